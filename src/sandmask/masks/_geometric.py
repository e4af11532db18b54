"""The geometric mean of gradients."""

from torch import Tensor

from sandmask.masks._base import Mask
from sandmask.masks._errors import MaskError
from sandmask.masks._functional import TensorMoments, and_weights, geometric_mean


class GeometricMean(Mask):
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

    def element_weights(self, moments: TensorMoments) -> Tensor:
        """1[A >= tau]."""
        return and_weights(moments.sign_sum, moments.count, self.tau)

    def direction(self, moments: TensorMoments) -> Tensor:
        """sign(mean g) exp(mean log(|g| + 1e-10)); zero where the gradients cancel out, whatever their order."""
        if moments.log_sum is None:
            raise MaskError("GeometricMean needs moments with log-magnitudes. Build them with `mask.new_moments()`.")
        return geometric_mean(moments.mean, moments.m2, moments.log_sum, moments.count)
