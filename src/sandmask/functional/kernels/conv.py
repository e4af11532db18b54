"""Convolutions of K runs as GPU kernels: forward, and the gradient of the input.

Filters are squares with an odd side, such as 3 x 3, and the padding is half of the side. Each kernel is a matrix
product, like the gradient of the weights in `conv_weights`. One factor, the input's pixels under each tap of the
filter, is not stored but only addressed. Images are [K, N, height, width, channels], and weights are
[K, out, taps, in], as `by_tap` returns them. The runs are the last axis of a launch. One program computes each sum,
always in the same order, so the results are deterministic.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.split import multiply, operand, unscaled
from sandmask.functional.kernels.tiles import SPLIT, Tiles, at_most, dividing, how, kind
from sandmask.functional.split import Halves

# Tiles by the kind of numbers (see `tiles.kind`).
TILES = {2: Tiles(128, 128, 64, 8, 3), 4: Tiles(64, 64, 32, 4, 3), SPLIT: Tiles(128, 128, 64, 8, 3)}
# Tiles for results with at most `THIN` channels.
THIN = 64
THIN_TILES = {**TILES, SPLIT: Tiles(128, 64, 64, 4, 2)}


class Shape(NamedTuple):
    """The shape of a convolution: sides and channels of input and output, and stride and side of the filter."""

    height: int
    width: int
    n_in: int
    high: int
    wide: int
    n_out: int
    stride: int
    side: int


@triton.jit
def within(place, size: tl.constexpr):
    """0 <= place < size in one comparison, because a negative number is large as an unsigned number."""
    return place.to(tl.uint32, bitcast=True) < size


@triton.jit
def first_tap(
    row,
    height: tl.constexpr,
    width: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    stride: tl.constexpr,
    side: tl.constexpr,
):
    """The input pixels under the first tap of output pixels: row, column, and index in the image."""
    padding: tl.constexpr = side // 2
    top = row % (high * wide) // wide * stride - padding
    left = row % wide * stride - padding
    if stride == 1:
        return top, left, row - padding * width - padding
    return top, left, (row // (high * wide) * height + top) * width + left


@triton.jit
def add_convolution(
    x,
    x_low,
    weight,
    weight_low,
    total,
    known,
    top,
    left,
    pixel,
    height: tl.constexpr,
    width: tl.constexpr,
    n_in: tl.constexpr,
    side: tl.constexpr,
    depth: tl.constexpr,
    split: tl.constexpr,
    precision: tl.constexpr,
):
    """Add conv(x) to one tile of output pixels and channels.

    `weight` points to the weights of each channel. `top`, `left` and `pixel` are from `first_tap`.
    """
    taps: tl.constexpr = side * side
    deep = tl.arange(0, depth)
    corner = pixel * n_in
    if n_in % depth == 0:  # a step is some channels under one tap
        for step in range(taps * n_in // depth):
            tap = step // (n_in // depth)
            down, right = tap // side, tap % side
            inside = known & within(top + down, height) & within(left + right, width)
            begin = corner + (down * width + right) * n_in + step % (n_in // depth) * depth
            place = begin[:, None] + deep[None, :]
            value = tl.load(x + place, mask=inside[:, None], other=0.0)
            w = tl.load(weight + (step * depth + deep)[:, None])
            value_low, w_low = value, w
            if split:
                value_low = tl.load(x + x_low + place, mask=inside[:, None], other=0.0)
                w_low = tl.load(weight + weight_low + (step * depth + deep)[:, None])
            total = multiply(value, value_low, w, w_low, total, split, precision)
    else:  # the first layer: all channels under all taps, in one row
        for start in range(0, taps * n_in, depth):
            place = start + deep
            down, right = place // (side * n_in), place // n_in % side
            y, z = top[:, None] + down[None, :], left[:, None] + right[None, :]
            inside = known[:, None] & (place < taps * n_in)[None, :] & within(y, height) & within(z, width)
            shift = corner[:, None] + ((down * width + right) * n_in + place % n_in)[None, :]
            is_weight = (place < taps * n_in)[:, None]
            value = tl.load(x + shift, mask=inside, other=0.0)
            w = tl.load(weight + place[:, None], mask=is_weight, other=0.0)
            value_low, w_low = value, w
            if split:
                value_low = tl.load(x + x_low + shift, mask=inside, other=0.0)
                w_low = tl.load(weight + weight_low + place[:, None], mask=is_weight, other=0.0)
            total = multiply(value, value_low, w, w_low, total, split, precision)
    return total


@triton.jit
def _forward_kernel(
    x,
    x_run,
    x_low,
    x_largest,
    weight,
    weight_run,
    weight_low,
    weight_largest,
    bias,
    out,
    n_rows,
    bias_run,
    relu: tl.constexpr,
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
    """conv(x) + bias, or its ReLU, for one tile of output pixels and channels."""
    run = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    unit = tl.program_id(1) * columns + tl.arange(0, columns)
    known = row < n_rows
    top, left, pixel = first_tap(row, height, width, high, wide, stride, side)
    total = add_convolution(
        x + run * x_run, x_low, weight + run * weight_run + unit[None, :] * (side * side * n_in), weight_low,
        tl.zeros((rows, columns), tl.float32), known, top, left, pixel,
        height, width, n_in, side, depth, split, precision,
    )  # fmt: skip
    total = unscaled(total, x_largest + run, weight_largest + run, split)
    total += tl.load(bias + run * bias_run + unit).to(tl.float32)[None, :]
    if relu:  # not tl.maximum, because NaN should propagate
        total = tl.where(total < 0, 0.0, total)
    out += run * n_rows * n_out
    tl.store(out + row[:, None] * n_out + unit[None, :], total, mask=known[:, None])


@triton.jit
def _input_gradient_kernel(
    grad,
    grad_run,
    grad_low,
    grad_largest,
    weight,
    weight_run,
    weight_low,
    weight_largest,
    out,
    n_samples,
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
    """The gradient for one tile of input pixels and channels.

    With a stride of 2, different taps reach pixels at even and odd positions: one middle tap or two outer taps of a
    3 x 3 filter. All pixels of a program are of one kind. Pixels that most taps of a 3 x 3 filter reach come first, so
    that the last programs are short.
    """
    padding: tl.constexpr = side // 2
    run = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    blocks: tl.constexpr = (n_in + columns - 1) // columns
    channel = tl.program_id(1) % blocks * columns + tl.arange(0, columns)
    deep = tl.arange(0, depth)
    odd_y, odd_x = 0, 0
    # The taps that reach a pixel are every `stride`-th tap from the first on.
    first_y, first_x, count_y, count_x = 0, 0, side, side
    tall, broad = height, width  # the number of pixels of this kind in each direction
    last_y, last_x = padding, padding  # distance from a pixel to the output pixel of its first tap
    if stride == 2:
        kind = 3 - tl.program_id(1) // blocks
        odd_y, odd_x = kind // 2, kind % 2
        first_y, first_x = (odd_y + padding) % 2, (odd_x + padding) % 2
        count_y, count_x = (side + 1 - first_y) // 2, (side + 1 - first_x) // 2
        last_y, last_x = (odd_y + padding) // 2, (odd_x + padding) // 2
        tall, broad = tl.maximum((height + 1 - odd_y) // 2, 1), tl.maximum((width + 1 - odd_x) // 2, 1)
    sample, place_y, place_x = row // (tall * broad), row // broad % tall, row % broad
    known = (sample < n_samples) & (odd_y < height) & (odd_x < width)
    bottom, right = place_y + last_y, place_x + last_x
    corner = ((sample * high + bottom) * wide + right) * n_out
    grad += run * grad_run
    weight += run * weight_run
    total = tl.zeros((rows, columns), tl.float32)
    for step in range(count_y * count_x * (n_out // depth)):
        turn = step // (n_out // depth)
        y, x = turn // count_x, turn % count_x
        inside = known & within(bottom - y, high) & within(right - x, wide)
        units = step % (n_out // depth) * depth + deep
        tap = (first_y + stride * y) * side + first_x + stride * x
        place = (corner - (y * wide + x) * n_out)[:, None] + units[None, :]
        own = (units * (side * side * n_in) + tap * n_in)[:, None] + channel[None, :]
        value = tl.load(grad + place, mask=inside[:, None], other=0.0)
        w = tl.load(weight + own, mask=(channel < n_in)[None, :], other=0.0)
        value_low, w_low = value, w
        if split:
            value_low = tl.load(grad + grad_low + place, mask=inside[:, None], other=0.0)
            w_low = tl.load(weight + weight_low + own, mask=(channel < n_in)[None, :], other=0.0)
        total = multiply(value, value_low, w, w_low, total, split, precision)
    total = unscaled(total, grad_largest + run, weight_largest + run, split)
    pixel = (sample * height + place_y * stride + odd_y) * width + place_x * stride + odd_x
    out += run * n_samples * (height * width * n_in)
    tl.store(out + pixel[:, None] * n_in + channel[None, :], total, mask=known[:, None] & (channel < n_in)[None, :])


def by_tap(weight: Tensor) -> Tensor:
    """Weights [K, out, in, side, side] as [K, out, taps, in], also in memory."""
    return weight.flatten(3).transpose(2, 3).contiguous()


def convolve(x: Tensor | Halves, taps: Tensor | Halves, bias: Tensor, stride: int, *, relu: bool = True) -> Tensor:
    """relu(conv(x) + bias), [K, N, height, width, out], or conv(x) + bias without `relu`.

    If runs share x [K, N, height, width, in], its stride between runs may be 0.
    """
    left, right = operand(x), operand(taps)
    n_samples, height, width, n_in = left.values.shape[-4:]
    n_out, n_taps = right.values.shape[-3:-1]
    high, wide = (height - 1) // stride + 1, (width - 1) // stride + 1
    shape = Shape(height, width, n_in, high, wide, n_out, stride, math.isqrt(n_taps))
    sizes = (len(bias), n_samples, shape.high, shape.wide, shape.n_out)
    out = torch.empty(sizes, dtype=_result_type(x), device=bias.device)
    n_rows = n_samples * shape.high * shape.wide
    tiles = (THIN_TILES if n_out <= THIN else TILES)[kind(x)]
    rows, columns = at_most(tiles.rows, n_rows), at_most(tiles.columns, shape.n_out)
    depth = dividing(tiles.depth, n_in) or at_most(tiles.depth, n_taps * n_in)
    launch: Any = _forward_kernel[(triton.cdiv(n_rows, rows), shape.n_out // columns, len(bias))]
    numbers = (n_rows, bias.stride(0), relu, *shape, rows, columns, depth, isinstance(x, Halves))
    launch(*left, *right, bias, out, *numbers, **how(tiles))
    return out


def input_gradient(grad: Tensor | Halves, taps: Tensor | Halves, stride: int, sides: torch.Size) -> Tensor:
    """The gradient of the input, [K, N, *sides, in], from the contiguous gradient of the convolution's result."""
    left, right = operand(grad), operand(taps)
    n_samples, high, wide, n_out = left.values.shape[-4:]
    n_taps, n_in = right.values.shape[-2:]
    shape = Shape(sides[0], sides[1], n_in, high, wide, n_out, stride, math.isqrt(n_taps))
    n_runs = len(left.values)
    out = torch.empty(n_runs, n_samples, *sides, shape.n_in, dtype=_result_type(grad), device=left.values.device)
    tiles = (THIN_TILES if n_in <= THIN else TILES)[kind(grad)]
    pixels = (
        n_samples * triton.cdiv(sides[0], stride) * triton.cdiv(sides[1], stride)
    )  # pixels of the most frequent kind
    rows, columns = at_most(tiles.rows, pixels), at_most(tiles.columns, shape.n_in)
    programs = (triton.cdiv(pixels, rows), triton.cdiv(shape.n_in, columns) * stride**2, n_runs)
    launch: Any = _input_gradient_kernel[programs]
    depth = dividing(tiles.depth, n_out)
    numbers = (n_samples, *shape, rows, columns, depth, isinstance(grad, Halves))
    launch(*left, *right, out, *numbers, **how(tiles))
    return out


def _result_type(x: Tensor | Halves) -> torch.dtype:
    return torch.float32 if isinstance(x, Halves) else x.dtype
