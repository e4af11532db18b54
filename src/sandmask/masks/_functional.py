"""The masks as pure functions of moments over environments, element by element.

They work on tensors of any shape, also under `torch.func.vmap` and `torch.compile`, because they do not branch on
values of tensors. `tau` and `gain` are numbers or 0-dimensional tensors (one per run in a stack).

The gradients of E environments are g_e. A = |mean_e sign(g_e)|, and var_e is the unbiased variance (divided by E - 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Scalar = float | Tensor

# A threshold this close to an agreement counts as equal to it. Agreements are multiples of 1/E, and a threshold such
# as 1/3 has no exact binary form. The tolerance is a few rounding errors of float32, and far below 1/E.
TAU_TOLERANCE = 5e-7

# The code of ILC and DomainBed adds this to the magnitude in the logarithm, and to the density in the division.
EPSILON = 1e-10

BINS = 10  # of a histogram of agreements


@dataclass(frozen=True)
class TensorMoments:
    """Moments over environments of the gradients of one tensor. Each moment has the shape of the tensor."""

    count: int
    sign_sum: Tensor
    mean: Tensor
    m2: Tensor
    """Sum of squared deviations from the mean."""
    log_sum: Tensor | None = None
    """Sum of log(|g| + 1e-10), which only the geometric mean needs."""


def agreement(sign_sum: Tensor, count: int) -> Tensor:
    """Return the agreement A = |mean_e sign(g_e)|, with sign(0) = 0: a zero gradient agrees with no other.

    :param sign_sum: sum over environments of sign(g).
    :param count: number of environments.
    :return: values in [0, 1].
    """
    return sign_sum.abs() / count


def and_weights(sign_sum: Tensor, count: int, tau: Scalar) -> Tensor:
    """Return the AND-mask: m = 1[A >= tau] (Parascandolo et al., 2021).

    :param sign_sum: sum over environments of sign(g).
    :param count: number of environments.
    :param tau: threshold on the agreement: a number or a 0-dimensional tensor.
    :return: weights, 0 or 1.
    """
    return (agreement(sign_sum, count) - tau >= -TAU_TOLERANCE).to(sign_sum.dtype)


def sand_weights(sign_sum: Tensor, mean: Tensor, m2: Tensor, count: int, tau: Scalar) -> Tensor:
    """Return the SAND-mask as printed (equations 2 and 3): m = max(0, tanh((A - tau) / s2)).

    s2 = var_e(g) / mean_e(g)^2 is the dispersion. Where s2 = 0, the weight is its limit 1[A > tau]. Where the mean is
    zero, the weight is 0.

    :param sign_sum: sum over environments of sign(g).
    :param mean: mean over environments.
    :param m2: sum of squared deviations from the mean.
    :param count: number of environments.
    :param tau: threshold on the agreement: a number or a 0-dimensional tensor.
    :return: weights in [0, 1].
    """
    excess = F.threshold(agreement(sign_sum, count) - tau, TAU_TOLERANCE, 0.0)
    # The mean is divided before it is squared, because the square of a small mean underflows and the square of a large
    # mean overflows. An infinite ratio gives tanh(inf) = 1. 0 * inf occurs for a zero mean or no excess: weight 0.
    ratio = mean * (m2 / (count - 1)).rsqrt()
    return torch.tanh(excess * ratio * ratio).nan_to_num(0.0)


def absolute_sand_weights(sign_sum: Tensor, m2: Tensor, count: int, tau: Scalar, gain: Scalar) -> Tensor:
    """Return the released form of the SAND-mask: m = max(0, tanh(gain (A - tau) / var_e(g))).

    Where the variance is 0, the weight is 1[A > tau].

    :param sign_sum: sum over environments of sign(g).
    :param m2: sum of squared deviations from the mean.
    :param count: number of environments.
    :param tau: threshold on the agreement: a number or a 0-dimensional tensor.
    :param gain: k of the released code.
    :return: weights in [0, 1].
    """
    excess = agreement(sign_sum, count) - tau
    return torch.where(excess > TAU_TOLERANCE, torch.tanh(gain * excess / (m2 / (count - 1))), 0.0)


def geometric_mean(mean: Tensor, m2: Tensor, log_sum: Tensor, count: int) -> Tensor:
    """Return ILC's geometric mean: sign(mean_e g) * exp(mean_e log(|g_e| + 1e-10)).

    If gradients cancel out, their mean is a rounding error that depends on the order of environments. A mean within
    this rounding error counts as zero.

    :param mean: mean over environments.
    :param m2: sum of squared deviations from the mean.
    :param log_sum: sum of log(|g| + 1e-10).
    :param count: number of environments.
    :return: the geometric mean, of the shape of `mean`.
    """
    magnitude = (log_sum / count).exp().clamp(max=torch.finfo(mean.dtype).max)
    error = m2.sqrt() * (count * torch.finfo(mean.dtype).eps)
    cancels = (mean.abs() <= error) & m2.isfinite()
    return torch.where(cancels, 0.0, mean.sign() * magnitude)


def log_magnitude(grads: Tensor) -> Tensor:
    """Return log(|g| + 1e-10), which the geometric mean averages."""
    return (grads.abs() + EPSILON).log()


def rescale_by_sparsity(masked: Tensor, weights: Tensor, valid: Tensor | None = None) -> Tensor:
    """Divide one tensor's masked gradient by the mean of its mask plus 1e-10, as ILC and DomainBed do.

    :param masked: masked gradient.
    :param weights: the mask.
    :param valid: 1 for elements and 0 for padding, which the mean excludes; no padding if not given.
    :return: the rescaled gradient.
    """
    density = weights.mean() if valid is None else (weights * valid).sum() / valid.sum()
    return finite(masked / (density + EPSILON), masked.dtype)


def finite(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`. Values beyond its range become its largest number; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return tensor.clamp(-largest, largest).to(dtype)


def agreement_counts(sign_sum: Tensor, count: int, bins: int = BINS) -> Tensor:
    """Count the elements of a flat tensor by their agreement A = |mean_e sign(g_e)|, in bins of equal width.

    Bin b holds b / bins <= A < (b + 1) / bins; the last bin also holds A = 1. Sums of signs are compared as integers,
    so an agreement of 3/10 is in the bin that begins at 3/10. Works under `torch.func.vmap` and never waits for the
    device.

    :param sign_sum: sum over environments of sign(g).
    :param count: number of environments.
    :param bins: number of bins.
    :return: counts, `[bins]`.
    """
    scaled = sign_sum.abs() * bins
    edges = torch.arange(1, bins, device=sign_sum.device, dtype=sign_sum.dtype) * count
    above = (scaled >= edges.unsqueeze(-1)).sum(-1, dtype=sign_sum.dtype)  # elements beyond each inner edge
    ends = sign_sum.new_full((1,), sign_sum.numel()), sign_sum.new_zeros(1)
    return -torch.cat([ends[0], above, ends[1]]).diff()
