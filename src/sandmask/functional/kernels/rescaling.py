"""Masked gradients of K runs divided by the densities of their masks, as GPU kernels.

The equivalent in torch is in `rescaling`. A flat vector is divided into tiles, each within one tensor. The first kernel
sums the mask over every tile, the second adds up the tiles of each tensor, always in the same order, and the third
divides. Any number of tensors needs three launches, one pass over the mask and one pass over the gradient.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.masks._functional import EPSILON

TILE = 2048
BLOCK = 1024  # number of tiles of a tensor that are added up at a time
LARGEST = torch.finfo(torch.float32).max


class _Cut(NamedTuple):
    """The tiles of a flat vector: start, end and tensor of each tile; first tile, end and size of each tensor."""

    begins: Tensor
    ends: Tensor
    tensors: Tensor
    first: Tensor
    last: Tensor
    sizes: Tensor


@triton.jit
def _tile_sums_kernel(weights, begins, ends, sums, numel, n_tiles, tile: tl.constexpr):
    number, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.load(begins + number) + tl.arange(0, tile)
    inside = place < tl.load(ends + number)
    values = tl.load(weights + run * numel + place, mask=inside, other=0.0)
    tl.store(sums + run * n_tiles + number, tl.sum(values, axis=0))


@triton.jit
def _density_kernel(sums, first, last, sizes, densities, n_tiles, n_tensors, block: tl.constexpr):
    number, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first + number), tl.load(last + number)
    total = tl.zeros((block,), tl.float32)
    for start in range(begin, end, block):
        place = start + tl.arange(0, block)
        total += tl.load(sums + run * n_tiles + place, mask=place < end, other=0.0)
    tl.store(densities + run * n_tensors + number, tl.sum(total, axis=0) / tl.load(sizes + number))


@triton.jit
def _divide_kernel(
    masked,
    densities,
    wanted,
    begins,
    ends,
    tensors,
    out,
    numel,
    n_tensors,
    epsilon,
    largest,
    tile: tl.constexpr,
):
    number, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.load(begins + number) + tl.arange(0, tile)
    inside = place < tl.load(ends + number)
    value = tl.load(masked + run * numel + place, mask=inside, other=0.0)
    divided = value / (tl.load(densities + run * n_tensors + tl.load(tensors + number)) + epsilon)
    # Numbers that are too large stay finite, and NaN propagates.
    divided = tl.where(divided > largest, largest, tl.where(divided < -largest, -largest, divided))
    value = tl.where(tl.load(wanted + run) > 0, divided, value)
    tl.store(out + run * numel + place, value, mask=inside)


def rescale(masked: Tensor, weights: Tensor, wanted: Tensor, *, sizes: tuple[int, ...]) -> tuple[Tensor]:
    """Divide the gradients [K, P] of tensors of these sizes by the mean of their weights where `wanted` [K] is > 0."""
    cut = _cut(sizes, masked.device)
    n_runs, numel = masked.shape
    n_tiles, n_tensors = len(cut.begins), len(cut.sizes)
    masked, weights, wanted = masked.contiguous(), weights.contiguous(), wanted.contiguous()
    sums, densities = masked.new_empty(n_runs, n_tiles), masked.new_empty(n_runs, n_tensors)
    out = torch.empty_like(masked)
    launch: Any = _tile_sums_kernel[(n_tiles, n_runs)]
    launch(weights, cut.begins, cut.ends, sums, numel, n_tiles, tile=TILE)
    launch = _density_kernel[(n_tensors, n_runs)]
    launch(sums, cut.first, cut.last, cut.sizes, densities, n_tiles, n_tensors, block=BLOCK)
    launch = _divide_kernel[(n_tiles, n_runs)]
    tiles = (cut.begins, cut.ends, cut.tensors)
    launch(masked, densities, wanted, *tiles, out, numel, n_tensors, EPSILON, LARGEST, tile=TILE)
    return (out,)


@lru_cache(maxsize=32)
def _cut(sizes: tuple[int, ...], device: torch.device) -> _Cut:
    """The tiles of tensors of these sizes. Created only once, because a captured program cannot copy from the host."""
    numbers = torch.tensor(sizes)
    tiles = -(-numbers // TILE)
    last = tiles.cumsum(0)
    first, ends = last - tiles, numbers.cumsum(0)
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), tiles)
    begins = (ends - numbers)[tensors] + TILE * (torch.arange(len(tensors)) - first[tensors])
    found = (begins, torch.minimum(begins + TILE, ends[tensors]), tensors, first, last, numbers.to(torch.float32))
    return _Cut(*(tensor.to(device) for tensor in found))
