"""The AND-mask, and masks that keep the same elements but apply to another gradient than the mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask._devices import widest_float
from sandmask.masks._base import Mask
from sandmask.masks._errors import MaskError
from sandmask.masks._functional import TensorMoments, and_weights, geometric_mean


class _SignThreshold(Mask):
    """Keeps elements of a gradient if enough environments agree on the sign."""

    def element_weights(self, moments: TensorMoments) -> Tensor:
        """1[A >= tau]."""
        return and_weights(moments.sign_sum, moments.count, self.tau)


class ANDMask(_SignThreshold):
    """Keep elements of the mean gradient if enough environments agree on the sign: m = 1[A >= tau].

    A = |mean_e sign(g_e)|. Because sign(0) = 0, an element that is zero in an environment (a dead ReLU) lowers the
    agreement. tau = 0 keeps everything and gives ERM's gradient; tau = 1 requires all environments to agree.

    With 3 environments, A is 0, 1/3, 2/3 or 1. If no gradient is zero, A is 1/3 or 1, so every tau in (1/3, 1] gives
    the same mask.

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

    If the gradient of one environment vanishes, so does the geometric mean, however large the other gradients are.
    Parascandolo et al., "Learning explanations that are hard to vary", ICLR 2021, with 1e-10 as in its code.

    Create the moments with `mask.new_moments()`, because they need sums of log-magnitudes.

    :param tau: in [0, 1]; with 1, the result is zero where signs differ, as in the definition of the geometric mean.
    :param rescale: see `Mask`.

    >>> import torch
    >>> GeometricMean(tau=1.0)(torch.tensor([[1.0, 4.0], [4.0, -1.0]]))
    tensor([2., 0.])
    """

    needs_log_magnitude = True

    def direction(self, moments: TensorMoments) -> Tensor:
        """sign(mean g) exp(mean log(|g| + 1e-10)); zero where the gradients cancel out, in any order."""
        if moments.log_sum is None:
            raise MaskError("GeometricMean needs moments with log-magnitudes. Build them with `mask.new_moments()`.")
        return geometric_mean(moments.mean, moments.m2, moments.log_sum, moments.count)


class AgrSum(_SignThreshold):
    """The sum of the environments' gradients where all gradients have the same sign, and 0 elsewhere.

    As in the paper, it is the sum and not the mean: E times the AND-mask with tau = 1.

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

    s is the mean magnitude of the elements that agree, over all tensors together. Every call draws new numbers. Masks
    with the same seed draw the same numbers, call by call, in every process.

    Mansilla et al., "Domain generalization via gradient surgery", ICCV 2021.

    :param seed: seed of the random numbers, an integer from 0 on.
    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise MaskError(f"Parameter `seed` should be an integer of at least 0. Found `seed` = {seed!r}.")
        super().__init__()
        self.seed = seed
        self.calls = 0

    def complete(self, weights: Sequence[Tensor], masked: Sequence[Tensor]) -> list[Tensor]:
        """Fill the masked elements with random numbers."""
        if not masked:
            return []
        size = _total([m.abs().sum() for m in masked]) / _total([w.sum() for w in weights]).clamp_min(1.0)
        filled = [
            torch.where(w > 0, m, size.to(m.device, m.dtype) * self._normal(index, m))
            for index, (w, m) in enumerate(zip(weights, masked, strict=True))
        ]
        self.calls += 1
        return filled

    def _normal(self, index: int, like: Tensor) -> Tensor:
        seed = hash((self.seed, self.calls, index)) % 2**63  # hashes of integers are the same in every process
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)

    def __repr__(self) -> str:
        return f"AgrRand(seed={self.seed})"


def _total(numbers: Sequence[Tensor]) -> Tensor:
    """The sum of numbers that may be on several devices."""
    device = numbers[0].device
    return torch.stack([number.to(device, widest_float(device)) for number in numbers]).sum()
