"""The masked mean of stacked gradients in one pass over memory: E gradients read once, one result written.

`masked_mean_of_stacks` uses it for CUDA tensors; the same numbers come from `GradientMoments`, which is the twin that
tests compare it with.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.masks._functional import TAU_TOLERANCE

if TYPE_CHECKING:
    from sandmask.masks._base import Mask

_BLOCK = 1024
_AND, _RELATIVE, _ABSOLUTE = 0, 1, 2


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """tanh for x >= 0: its series where the quotient would lose digits."""
    e = tl.exp(-2.0 * x)
    square = x * x
    return tl.where(x < 0.05, x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0))), (1.0 - e) / (1.0 + e))


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    grads, out, numel, stride, tau, gain, tolerance, count: tl.constexpr, kind: tl.constexpr, block: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    mean = tl.zeros((block,), tl.float32)
    m2 = tl.zeros((block,), tl.float32)
    signs = tl.zeros((block,), tl.float32)
    for e in tl.static_range(count):
        g = tl.load(grads + e * stride + offsets, mask=inside, other=0.0).to(tl.float32)
        # Welford, with the mean as a weighted sum: the difference of two huge gradients may overflow, a mean may not.
        before = mean
        mean = before * (e / (e + 1)) + g * (1 / (e + 1))
        m2 += (g - before) * (g - mean)
        signs += tl.where(g > 0, 1.0, 0.0) - tl.where(g < 0, 1.0, 0.0)
    excess = tl.abs(signs) / count - tau
    if kind == 0:
        weight = tl.where(excess >= -tolerance, 1.0, 0.0)
    else:
        variance = m2 / (count - 1)
        if kind == 1:
            ratio = tl.abs(mean) / tl.sqrt(variance)
            weight = _tanh(excess * ratio * ratio)
            weight = tl.where((excess > tolerance) & (mean != 0), weight, 0.0)
        else:
            weight = tl.where(excess > tolerance, _tanh(gain * excess / variance), 0.0)
    # A gradient that is no number must stay visible: 0 * NaN is NaN.
    tl.store(out + offsets, weight * mean, mask=inside)


def supports(mask: "Mask", grads: Tensor) -> bool:
    """Whether the kernel computes this mask on these gradients."""
    return (
        _kind(mask) is not None
        and mask.rescale == "none"
        and not isinstance(mask.tau, Tensor)
        and grads.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 2 <= grads.shape[0] <= 64  # the loop over environments is unrolled
        and grads.is_contiguous()
        and grads.numel() > 0
    )


def masked_mean(mask: "Mask", grads: Tensor) -> Tensor:
    """Masked mean of gradients `[E, *shape]` on a GPU."""
    out = torch.empty_like(grads[0])
    numel, count = out.numel(), grads.shape[0]
    gain = getattr(mask, "gain", None) or 1.0
    launch: Any = _kernel[(triton.cdiv(numel, _BLOCK),)]
    launch(grads, out, numel, numel, mask.tau, gain, TAU_TOLERANCE, count=count, kind=_kind(mask), block=_BLOCK)
    return out


def _kind(mask: "Mask") -> int | None:
    from sandmask.masks._and import ANDMask
    from sandmask.masks._sand import SANDMask

    if type(mask) is ANDMask:
        return _AND
    if type(mask) is SANDMask and not isinstance(mask.gain, Tensor):
        return _RELATIVE if mask.gain is None else _ABSOLUTE
    return None
