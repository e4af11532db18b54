"""Random keys on a GPU by one kernel instead of a dozen. The equivalents in `random` give the same bits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.tiles import places

BLOCK = 1024


@triton.jit
def mix(x):
    """SplitMix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fold_kernel(keys, data, result, numel, number, is_tensor: tl.constexpr, block: tl.constexpr):
    place = places(tl.program_id(0), block, numel)
    inside = place < numel
    key = tl.load(keys + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
    if is_tensor:
        value = tl.load(data + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
    else:
        value = tl.zeros((block,), tl.uint64) + number
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    folded = mix(key + (value + 1) * golden)
    tl.store(result + place, folded.to(tl.int64, bitcast=True), mask=inside)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """`random.fold`."""
    if isinstance(data, Tensor):
        shape = (key + data).shape
        key, values = (tensor.to(torch.int64).expand(shape).contiguous() for tensor in (key, data))
        number = 0
    else:
        key = values = key.contiguous()
        number = data
    result = torch.empty_like(key)
    launch: Any = _fold_kernel[(triton.cdiv(max(key.numel(), 1), BLOCK),)]
    launch(key, values, result, key.numel(), number, is_tensor=isinstance(data, Tensor), block=BLOCK)
    return result
