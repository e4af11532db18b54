"""The AND-mask, and the masks that keep the same elements of another gradient than the mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask._devices import widest_float
from sandmask.masks._base import Mask
from sandmask.masks._errors import MaskError
from sandmask.masks._functional import TensorMoments, and_weights, geometric_mean


class _SignThreshold(Mask):
    """Keeps the elements of a gradient on whose sign enough environments agree."""

    def element_weights(self, moments: TensorMoments) -> Tensor:
        """1[A >= tau]."""
        return and_weights(moments.sign_sum, moments.count, self.tau)


class ANDMask(_SignThreshold):
    """Keep an element of the mean gradient where enough environments agree on its sign: m = 1[A >= tau].

    A = |mean_e sign(g_e)|, with sign(0) = 0, so that an element that is zero in an environment (a dead
    ReLU) counts against agreement. tau = 0 keeps everything and gives ERM's gradient; tau = 1 requires all
    environments to agree.

    With 3 environments A is 0, 1/3, 2/3 or 1, and only 1/3 or 1 where no gradient is zero: every tau in
    (1/3, 1] then gives the same mask.

    Parascandolo et al., "Learning explanations that are hard to vary", ICLR 2021; section 3.1 of the
    SAND-mask paper.

    :param tau: in [0, 1].
    :param rescale: see `Mask`.

    >>> import torch
    >>> ANDMask(tau=1.0)(torch.tensor([[1.0, 3.0], [3.0, -1.0]]))
    tensor([2., 0.])
    """


class GeometricMean(_SignThreshold):
    """AND-mask of the geometric mean: 1[A >= tau] * sign(mean_e g_e) * exp(mean_e log(|g_e| + 1e-10)).

    One environment with a vanishing gradient makes the geometric mean vanish, however large the others' are.
    Parascandolo et al., "Learning explanations that are hard to vary", ICLR 2021, with 1e-10 as in its code.

    Streaming needs moments that sum log-magnitudes: `mask.new_moments()`.

    :param tau: in [0, 1]; 1 is the geometric mean proper, which is zero where signs differ.
    :param rescale: see `Mask`.

    >>> import torch
    >>> GeometricMean(tau=1.0)(torch.tensor([[1.0, 4.0], [4.0, -1.0]]))
    tensor([2., 0.])
    """

    needs_log_magnitude = True

    def direction(self, moments: TensorMoments) -> Tensor:
        """sign(mean g) exp(mean log(|g| + 1e-10)); zero where the gradients cancel out, whatever their order."""
        if moments.log_sum is None:
            raise MaskError("GeometricMean needs moments with log-magnitudes. Build them with `mask.new_moments()`.")
        return geometric_mean(moments.mean, moments.m2, moments.log_sum, moments.count)


class AgrSum(_SignThreshold):
    """The sum of the environments' gradients where all of them have the same sign, and 0 elsewhere.

    It is E times the AND-mask with tau = 1: the sum, as in the paper, not the mean.

    Mansilla et al., "Domain generalization via gradient surgery", ICCV 2021.

    >>> import torch
    >>> AgrSum()(torch.tensor([[1.0, 3.0], [3.0, -1.0]]))
    tensor([4., 0.])
    """

    def __init__(self) -> None:
        super().__init__(tau=1.0)

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
        if not masked:
            return []
        size = _total([m.abs().sum() for m in masked]) / _total([w.sum() for w in weights]).clamp_min(1.0)
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


def _total(numbers: Sequence[Tensor]) -> Tensor:
    """The sum of numbers that may be on several devices."""
    device = numbers[0].device
    return torch.stack([number.to(device, widest_float(device)) for number in numbers]).sum()
