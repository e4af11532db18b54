"""The sum of the gradients where all environments agree, alone or with noise elsewhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask.masks._base import Mask
from sandmask.masks._errors import MaskError
from sandmask.masks._functional import TensorMoments, and_weights


class AgrSum(Mask):
    """The sum of the environments' gradients where all of them have one sign, and 0 elsewhere.

    It is E times the AND-mask with tau = 1: the sum, as in the paper, not the mean.

    Mansilla et al., "Domain generalization via gradient surgery", ICCV 2021.

    >>> import torch
    >>> AgrSum()(torch.tensor([[1.0, 3.0], [3.0, -1.0]]))
    tensor([4., 0.])
    """

    def __init__(self) -> None:
        super().__init__(tau=1.0)

    def element_weights(self, moments: TensorMoments) -> Tensor:
        """1 where all signs are equal."""
        return and_weights(moments.sign_sum, moments.count, self.tau)

    def direction(self, moments: TensorMoments) -> Tensor:
        """sum_e g_e."""
        return moments.mean * moments.count

    def __repr__(self) -> str:
        return "AgrSum()"


class AgrRand(AgrSum):
    """`AgrSum`, with random numbers from N(0, s^2) instead of the zeros.

    s is the mean size of the elements that agree, in all tensors together. Every call draws new numbers; masks with
    the same seed draw the same ones, call by call, and so do several processes.

    Mansilla et al., "Domain generalization via gradient surgery", ICCV 2021.

    :param seed: of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise MaskError(f"Parameter `seed` should be a whole number from 0 on. Found `seed` = {seed!r}.")
        super().__init__()
        self.seed = seed
        self.calls = 0

    def complete(self, weights: Sequence[Tensor], masked: Sequence[Tensor]) -> list[Tensor]:
        """Fill what the mask left out."""
        size = noise_size([w.sum() for w in weights], [m.abs().sum() for m in masked])
        filled = [
            torch.where(w > 0, m, size.to(m.device, m.dtype) * self._normal(place, m))
            for place, (w, m) in enumerate(zip(weights, masked, strict=True))
        ]
        self.calls += 1
        return filled

    def _normal(self, place: int, like: Tensor) -> Tensor:
        seed = hash((self.seed, self.calls, place)) % 2**63  # of integers: the same in every process
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)

    def __repr__(self) -> str:
        return f"AgrRand(seed={self.seed})"


def noise_size(counts: Sequence[Tensor], sums: Sequence[Tensor]) -> Tensor:
    """The mean size of the elements that agree, from each tensor's number of them and sum of their sizes."""
    if not counts:
        return torch.zeros(())
    home = counts[0].device
    count = torch.stack([each.to(home, torch.float64) for each in counts]).sum()
    return torch.stack([each.to(home, torch.float64) for each in sums]).sum() / count.clamp_min(1.0)
