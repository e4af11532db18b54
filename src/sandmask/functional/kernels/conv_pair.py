"""A sum of 3 x 3 convolutions of K runs as a GPU kernel: the derivative of a convolution along input and weights."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.conv import Shape, add_convolution, first_tap
from sandmask.functional.kernels.split import operand, unscaled
from sandmask.functional.kernels.tiles import SPLIT, Tiles, at_most, dividing, how, kind
from sandmask.functional.split import Halves

# Tiles by the kind of numbers (see `tiles.kind`).
TILES = {2: Tiles(128, 128, 64, 8, 3), 4: Tiles(64, 64, 32, 4, 3), SPLIT: Tiles(128, 64, 64, 8, 3)}


@triton.jit
def _sum_kernel(
    x,
    x_run,
    x_low,
    x_largest,
    weight,
    weight_run,
    weight_low,
    weight_largest,
    other_x,
    other_x_run,
    other_x_low,
    other_x_largest,
    other_weight,
    other_weight_run,
    other_weight_low,
    other_weight_largest,
    bias,
    out,
    n_rows,
    bias_run,
    two: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    n_in: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    n_out: tl.constexpr,
    stride: tl.constexpr,
    side: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    split: tl.constexpr,
    precision: tl.constexpr,
):
    """conv(x) + bias, or conv(x) + conv(other_x) + bias, for one tile of output pixels and channels."""
    run = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    unit = tl.program_id(1) * columns + tl.arange(0, columns)
    known = row < n_rows
    top, left, pixel = first_tap(row, height, width, high, wide, stride, side)
    of_unit = unit[None, :] * (side * side * n_in)
    total = add_convolution(
        x + run * x_run, x_low, weight + run * weight_run + of_unit, weight_low,
        tl.zeros((rows, columns), tl.float32), known, top, left, pixel,
        height, width, n_in, side, depth, split, precision,
    )  # fmt: skip
    total = unscaled(total, x_largest + run, weight_largest + run, split)
    if two:
        begin = total
        if split:  # both pairs of halves have their own scales
            begin = tl.zeros((rows, columns), tl.float32)
        other = add_convolution(
            other_x + run * other_x_run, other_x_low, other_weight + run * other_weight_run + of_unit,
            other_weight_low, begin, known, top, left, pixel,
            height, width, n_in, side, depth, split, precision,
        )  # fmt: skip
        if split:
            other = total + unscaled(other, other_x_largest + run, other_weight_largest + run, split)
        total = other
    total += tl.load(bias + run * bias_run + unit).to(tl.float32)[None, :]
    out += run * n_rows * n_out
    tl.store(out + row[:, None] * n_out + unit[None, :], total, mask=known[:, None])


def convolve_sum(pairs: Sequence[tuple[Tensor | Halves, Tensor | Halves]], bias: Tensor, stride: int) -> Tensor:
    """The sum of one or two convolutions of images with weights by tap, plus bias: [K, N, height, width, out].

    All images are [K, N, height, width, in]; see `kernels.conv.convolve`.
    """
    (x, taps), (other_x, other_taps) = pairs[0], pairs[-1]
    left, right = operand(x), operand(taps)
    n_samples, height, width, n_in = left.values.shape[-4:]
    high, wide, n_out = (height - 1) // stride + 1, (width - 1) // stride + 1, right.values.shape[-3]
    halves = isinstance(x, Halves)
    sizes = (len(bias), n_samples, high, wide, n_out)
    out = torch.empty(sizes, dtype=torch.float32 if halves else left.values.dtype, device=bias.device)
    n_rows, tiles = n_samples * high * wide, TILES[kind(x)]
    rows, columns = at_most(tiles.rows, n_rows), at_most(tiles.columns, n_out)
    depth = dividing(tiles.depth, n_in) or at_most(tiles.depth, 9 * n_in)
    launch: Any = _sum_kernel[(triton.cdiv(n_rows, rows), n_out // columns, len(bias))]
    shape = Shape(height, width, n_in, high, wide, n_out, stride, 3)
    numbers = (n_rows, bias.stride(0), len(pairs) == 2, *shape, rows, columns, depth, halves)
    launch(*left, *right, *operand(other_x), *operand(other_taps), bias, out, *numbers, **how(tiles))
    return out
