"""The SAND-mask."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.masks._base import Mask, Rescale, check_number
from sandmask.masks._errors import MaskError, warn_once
from sandmask.masks._functional import TAU_TOLERANCE, Scalar, TensorMoments, absolute_sand_weights, sand_weights
from sandmask.masks._two_pass import works_in_place

_RELEASED_GAIN = 10.0


class SANDMask(Mask):
    """Weight each element of the mean gradient by how well environments agree on its sign and size.

    The printed mask (equations 2 and 3) is m = max(0, tanh((A - tau) / s2)), where A = |mean_e sign(g_e)|. The
    dispersion s2 = var_e(g) / mean_e(g)^2 is the unbiased variance (E - 1) over the squared mean. If gradients are
    identical (s2 = 0), m = 1[A > tau]. If the mean is zero, m = 0.

    The mask that the authors released (`dispersion="absolute"`) is m = max(0, tanh(gain (A - tau) / var_e(g))). It
    depends on the scale of the gradients: at 1e-4, the tanh saturates, and the mask is a threshold at A > tau.

    With tau = 1, m is zero everywhere, because A - 1 <= 0, and nothing trains. This raises a `MaskWarning` once.

    A negative tau also keeps elements whose signs differ, with a weight that decreases with their dispersion. With
    E = 2, only a negative tau keeps them: A is 0, 1/2 or 1, and for any tau >= 0 the SAND-mask is zero wherever the
    AND-mask is zero.

    :param tau: in [-1, 1]; use a value below 1.
    :param rescale: see `Mask`.
    :param dispersion: "relative" (the paper) or "absolute" (the released code).
    :param gain: k of the released code, only with `dispersion="absolute"`, where the default is 10.

    >>> import torch
    >>> SANDMask(tau=0.5)(torch.tensor([[1.0, 1.0, 2.0], [1.0, -1.0, 1.0]]))
    tensor([1.0000, 0.0000, 1.4670])
    """

    tau_range = (-1.0, 1.0)

    def __init__(
        self,
        tau: Scalar,
        rescale: Rescale = "none",
        dispersion: Literal["relative", "absolute"] = "relative",
        gain: Scalar | None = None,
    ) -> None:
        super().__init__(tau, rescale)
        if dispersion not in ("relative", "absolute"):
            raise MaskError(
                f'Parameter `dispersion` should be "relative" or "absolute". Found `dispersion` = {dispersion!r}.'
            )
        if gain is not None and dispersion == "relative":
            raise MaskError('Parameter `gain` should be left out unless `dispersion` = "absolute".')
        if gain is not None:
            check_number("gain", gain)
            if not isinstance(gain, Tensor) and not (gain > 0 and math.isfinite(gain)):
                raise MaskError(f"Parameter `gain` should be positive. Found `gain` = {gain}.")
        if not isinstance(tau, Tensor) and tau == 1:
            warn_once(
                "sand-tau-1",
                "SANDMask with `tau` = 1, the default in the paper's table, is zero everywhere, because no agreement "
                "exceeds 1: nothing will train. Choose a `tau` below 1.",
            )
        self.dispersion = dispersion
        self.gain = _RELEASED_GAIN if gain is None and dispersion == "absolute" else gain

    def element_weights(self, moments: TensorMoments) -> Tensor:
        """Return equation 2, or the released variant of it."""
        if self.gain is None and not torch.is_grad_enabled() and works_in_place(moments.mean):
            return _sand_weights_in_place(moments, self.tau)
        if self.gain is None:
            return sand_weights(moments.sign_sum, moments.mean, moments.m2, moments.count, self.tau)
        return absolute_sand_weights(moments.sign_sum, moments.m2, moments.count, self.tau, self.gain)


def _sand_weights_in_place(moments: TensorMoments, tau: Scalar) -> Tensor:
    """`sand_weights` with two temporary tensors instead of ten, so that they stay in a CPU's cache."""
    ratio = (moments.m2 / (moments.count - 1)).rsqrt_().mul_(moments.mean)
    excess = moments.sign_sum.abs().div_(moments.count).sub_(tau)
    excess = F.threshold(excess, TAU_TOLERANCE, 0.0, inplace=True)
    return excess.mul_(ratio).mul_(ratio).tanh_().nan_to_num_(0.0)
