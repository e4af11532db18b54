"""Masks and moments of gradients `[E, *shape]` on a GPU, in one pass over memory: every gradient is read once.

`masked_mean` computes the masked mean, and `moments` the moments. Tests compare them with `_two_pass.gradient_moments`
and the functions of `_functional`, which compute the same numbers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.masks._functional import TAU_TOLERANCE

if TYPE_CHECKING:
    from sandmask.masks._base import Mask

_BLOCK = 1024
_MOST_ENVIRONMENTS = 64  # the loop over environments is unrolled
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AND, _RELATIVE, _ABSOLUTE = 0, 1, 2


@triton.jit
def _tanh(x):
    """tanh for x >= 0. For small x, a series is used, because the quotient would lose digits."""
    e = tl.exp(-2.0 * x)
    square = x * x
    return tl.where(x < 0.05, x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0))), (1.0 - e) / (1.0 + e))


@triton.jit
def _moments(grads, offsets, inside, row, count: tl.constexpr, unit: tl.constexpr):
    """Sum of signs, mean and M2 of a block of elements.

    Deviations are computed from the first environment and corrected at the end. This loses at most a factor E in
    precision, because the first gradient is at most sqrt(M2) away from the mean. Identical gradients give exactly 0.
    """
    first = tl.load(grads + offsets, mask=inside, other=0.0).to(tl.float32)
    mean = first * (1.0 / count)
    signs = tl.where(first > 0, 1.0, 0.0) - tl.where(first < 0, 1.0, 0.0)
    squares = tl.zeros_like(first)
    stride = tl.cast(row, tl.int64) * unit  # all environments together may have more than 2^31 elements
    for e in tl.static_range(1, count):
        g = tl.load(grads + e * stride + offsets, mask=inside, other=0.0).to(tl.float32)
        mean += g * (1.0 / count)
        away = g - first
        squares += away * away
        signs += tl.where(g > 0, 1.0, 0.0) - tl.where(g < 0, 1.0, 0.0)
    shift = mean - first
    m2 = tl.maximum(squares - count * (shift * shift), 0.0)
    # Gradients that are too large to square have an infinite dispersion, but not NaN.
    return signs, mean, tl.where(squares == float("inf"), squares, m2)


@triton.jit
def _weight(signs, mean, m2, tau, gain, tolerance, count: tl.constexpr, kind: tl.constexpr):
    """The mask of a block of elements."""
    excess = tl.abs(signs) * (1.0 / count) - tau
    if kind == 0:
        weight = tl.where(excess >= -tolerance, 1.0, 0.0)
    elif kind == 1:
        # (mean / std)^2 is divided before it is squared, so that neither a small nor a large mean is lost.
        ratio = mean * tl.rsqrt(m2 * (1.0 / (count - 1)))
        weight = tl.where((excess > tolerance) & (mean != 0), _tanh(excess * ratio * ratio), 0.0)
    else:
        weight = tl.where(excess > tolerance, _tanh(gain * excess / (m2 * (1.0 / (count - 1)))), 0.0)
    return weight


@triton.jit
def _masked_mean_kernel(
    grads,
    out,
    numel,
    row,
    tau,
    gain,
    tolerance,
    count: tl.constexpr,
    unit: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    signs, mean, m2 = _moments(grads, offsets, inside, row, count, unit)
    weight = _weight(signs, mean, m2, tau, gain, tolerance, count, kind)
    # NaN propagates, because 0 * NaN is NaN.
    tl.store(out + offsets, weight * mean, mask=inside)


@triton.jit
def _moments_kernel(
    grads,
    sign_sum,
    mean_out,
    m2_out,
    numel,
    row,
    count: tl.constexpr,
    unit: tl.constexpr,
    block: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    signs, mean, m2 = _moments(grads, offsets, inside, row, count, unit)
    tl.store(sign_sum + offsets, signs, mask=inside)
    tl.store(mean_out + offsets, mean, mask=inside)
    tl.store(m2_out + offsets, m2, mask=inside)


@triton.jit
def _weigh_kernel(
    sign_sum,
    mean,
    m2,
    tau,
    gain,
    weights,
    masked,
    numel,
    tolerance,
    count: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    run = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    inside = offsets < numel
    offsets += run * numel
    value = tl.load(mean + offsets, mask=inside)
    signs = tl.load(sign_sum + offsets, mask=inside)
    spread = tl.load(m2 + offsets, mask=inside)
    weight = _weight(signs, value, spread, tl.load(tau + run), tl.load(gain + run), tolerance, count, kind)
    tl.store(weights + offsets, weight, mask=inside)
    tl.store(masked + offsets, weight * value, mask=inside)


def takes(grads: Tensor) -> bool:
    """Whether the kernels support these gradients `[E, *shape]`."""
    return (
        grads.dtype in _DTYPES
        and 2 <= grads.shape[0] <= _MOST_ENVIRONMENTS
        and grads.is_contiguous()
        and grads.numel() > 0
    )


def supports(mask: "Mask", grads: Tensor) -> bool:
    """Whether `masked_mean` computes this mask on these gradients."""
    numbers = not isinstance(mask.tau, Tensor) and not isinstance(getattr(mask, "gain", None), Tensor)
    return takes(grads) and kind_of(mask) is not None and mask.rescale == "none" and numbers


def masked_mean(mask: "Mask", grads: Tensor) -> Tensor:
    """Masked mean of gradients `[E, *shape]`."""
    out = torch.empty_like(grads[0])
    # Triton does not accept NumPy numbers, and would specialize the kernel on integers.
    tau, gain = float(mask.tau), float(getattr(mask, "gain", None) or 1.0)
    launch: Any = _masked_mean_kernel[(triton.cdiv(out.numel(), _BLOCK),)]
    launch(grads, out, *_sizes(grads), tau, gain, TAU_TOLERANCE, **_constants(grads), kind=kind_of(mask))
    return out


def moments(grads: Tensor, outs: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of signs, mean and M2 over the first dimension of gradients `[E, *shape]`, in float32; written to `outs`."""
    outs = outs or [torch.empty(grads.shape[1:], device=grads.device) for _ in range(3)]
    launch: Any = _moments_kernel[(triton.cdiv(outs[0].numel(), _BLOCK),)]
    launch(grads, *outs, *_sizes(grads), **_constants(grads))
    return outs[0], outs[1], outs[2]


def weigh(*tensors: Tensor, count: int, kind: int) -> tuple[Tensor, Tensor]:
    """Mask and masked mean [K, P] from the sum of signs, mean and M2 [K, P], tau and gain [K]."""
    tensors = tuple(tensor.contiguous() for tensor in tensors)
    weights, masked = (torch.empty_like(tensors[1]) for _ in range(2))
    numel = tensors[1][0].numel()
    launch: Any = _weigh_kernel[(triton.cdiv(numel, _BLOCK), len(weights))]
    launch(*tensors, weights, masked, numel, TAU_TOLERANCE, count=count, kind=kind, block=_BLOCK)
    return weights, masked


def _sizes(grads: Tensor) -> tuple[int, int]:
    """The number of elements of one gradient, in elements and in units to which rows are aligned."""
    numel = grads[0].numel()
    return numel, numel // _unit(numel)


def _constants(grads: Tensor) -> dict[str, int]:
    return {"count": grads.shape[0], "unit": _unit(grads[0].numel()), "block": _BLOCK}


def _unit(numel: int) -> int:
    """The unit to which rows are aligned. Rows that begin at multiples of four elements can be read four at a time."""
    return 4 if numel % 4 == 0 else 1


def kind_of(mask: "Mask") -> int | None:
    """The number of this mask in the kernel; None for other masks."""
    from sandmask.masks._and import ANDMask
    from sandmask.masks._sand import SANDMask

    if type(mask) is ANDMask:
        return _AND
    if type(mask) is SANDMask:
        return _RELATIVE if mask.gain is None else _ABSOLUTE
    return None
