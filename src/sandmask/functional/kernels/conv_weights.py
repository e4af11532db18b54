"""The gradients of a convolution's weights, of K runs and by environment, as GPU kernels.

The gradient in each of E environments is a product of two matrices. One program computes a tile of the product from a
part of the environment's pixels. A second kernel adds the parts up, and folds the environments into the moments that
masks need. There are enough parts to occupy a GPU, because the few weights of a first layer are only one tile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.conv import THIN, Shape, first_tap, within
from sandmask.functional.kernels.moments import welford
from sandmask.functional.kernels.split import Operand, multiply, operand, unscaled
from sandmask.functional.kernels.tiles import SPLIT, Tiles, at_most, dividing, how, kind
from sandmask.functional.split import Halves

# Tiles by the kind of numbers (see `tiles.kind`).
TILES = {2: Tiles(128, 64, 64, 4, 3), 4: Tiles(64, 64, 32, 4, 3), SPLIT: Tiles(128, 128, 64, 8, 3)}
THIN_TILES = {2: Tiles(64, 64, 64, 4, 4), 4: Tiles(64, 64, 32, 4, 3), SPLIT: Tiles(64, 64, 64, 4, 3)}
PROGRAMS = 400  # smallest number of programs in a launch: three for each multiprocessor of a large GPU
SHORTEST = 8  # smallest number of steps in a program's sum
LONGEST = 32768  # largest number of pixels over which a program sums
FEW = 64  # with at most this many weights per output channel, parts cost nothing
LONGEST_OF_FEW = 2048  # like `LONGEST`, for layers with few weights, because short sums are more exact
NUMBERS = 1024  # numbers that a program adds up at a time


@triton.jit
def _weight_kernel(
    grad,
    grad_run,
    grad_low,
    grad_largest,
    x,
    x_run,
    x_low,
    x_largest,
    out,
    n_rows,
    part,
    whole: tl.constexpr,
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
    """A tile of grad^T x, from a part of one environment's pixels. With `whole`, all parts have the same size."""
    run = tl.program_id(2).to(tl.int64)
    taps: tl.constexpr = side * side
    blocks: tl.constexpr = (taps * n_in + columns - 1) // columns
    unit = tl.program_id(0) // blocks * rows + tl.arange(0, rows)
    block = tl.program_id(0) % blocks
    parts = tl.cdiv(n_rows, part)
    begin = tl.program_id(1) % parts * part
    length = part
    if not whole:
        length = tl.minimum(n_rows - begin, part)
    begin += tl.program_id(1) // parts * n_rows
    grad += run * grad_run
    x += run * x_run
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, length, depth):
        row = start + tl.arange(0, depth)
        known = (row < length) | whole
        row += begin
        at = row[:, None] * n_out + unit[None, :]
        g = tl.load(grad + at, mask=known[:, None], other=0.0)
        top, left, pixel = first_tap(row, height, width, high, wide, stride, side)
        corner = pixel * n_in
        if n_in % columns == 0:  # all columns are under one tap
            tap = block // (n_in // columns)
            down, right = tap // side, tap % side
            inside = (known & within(top + down, height) & within(left + right, width))[:, None]
            corner += (down * width + right) * n_in + block % (n_in // columns) * columns
            place = corner[:, None] + tl.arange(0, columns)[None, :]
        else:
            number = block * columns + tl.arange(0, columns)
            below, beside = number // (side * n_in), number // n_in % side
            y, z = top[:, None] + below[None, :], left[:, None] + beside[None, :]
            inside = known[:, None] & (number < taps * n_in)[None, :] & within(y, height) & within(z, width)
            place = corner[:, None] + ((below * width + beside) * n_in + number % n_in)[None, :]
        value = tl.load(x + place, mask=inside, other=0.0)
        g_low, value_low = g, value
        if split:
            g_low = tl.load(grad + grad_low + at, mask=known[:, None], other=0.0)
            value_low = tl.load(x + x_low + place, mask=inside, other=0.0)
        total = multiply(tl.trans(g), tl.trans(g_low), value, value_low, total, split, precision)
    total = unscaled(total, grad_largest + run, x_largest + run, split)
    # The parameter is [out, in, side, side].
    column = block * columns + tl.arange(0, columns)
    place = unit[:, None] * (taps * n_in) + (column % n_in * taps + column // n_in)[None, :]
    out += (run * tl.num_programs(1) + tl.program_id(1)) * (n_out * taps * n_in)
    tl.store(out + place, total, mask=(column < taps * n_in)[None, :])


@triton.jit
def _fold_parts_kernel(
    parts,
    unscale,
    signs_out,
    mean_out,
    m2_out,
    n_weights,
    n_parts,
    out_run,
    n_envs: tl.constexpr,
    only_mean: tl.constexpr,
    scaled: tl.constexpr,
    at_once: tl.constexpr,
    block: tl.constexpr,
):
    """Moments over environments of the sums over parts [K, E, parts, n_weights]."""
    run = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < n_weights
    parts += run * n_envs * n_parts * n_weights
    signs = tl.zeros((block,), tl.float32)
    mean = tl.zeros((block,), tl.float32)
    m2 = tl.zeros((block,), tl.float32)
    for e in range(n_envs):
        gradient = tl.zeros((block,), tl.float32)
        for start in range(0, n_parts, at_once):
            number = start + tl.arange(0, at_once)
            known = (number < n_parts)[:, None] & inside[None, :]
            at = (e * n_parts + number).to(tl.int64)[:, None] * n_weights + place[None, :]
            gradient += tl.sum(tl.load(parts + at, mask=known, other=0.0), axis=0)
        if scaled:
            gradient *= tl.load(unscale + run * n_envs + e)
        signs, mean, m2 = welford(gradient, e, signs, mean, m2)
    place += run * out_run
    tl.store(mean_out + place, mean, mask=inside)
    if not only_mean:
        tl.store(signs_out + place, signs, mask=inside)
        tl.store(m2_out + place, m2, mask=inside)


def weight_moments(
    grad: Tensor | Halves,
    x: Tensor | Halves,
    unscale: Tensor | None,
    n_envs: int,
    stride: int,
    targets: Sequence[Tensor] | Tensor,
    side: int = 3,
) -> None:
    """Moments over environments of the gradients of the weights [out, in, side, side], from contiguous tensors.

    The N samples are sorted by environment. Targets are views [K, out * in * taps] of larger buffers [K, P]: sum of
    signs, mean and M2. The gradient of each environment is multiplied by `unscale` [K, E].
    """
    _fold(weight_parts(grad, x, n_envs, stride, side), unscale, targets)


def weight_gradient(grad: Tensor | Halves, x: Tensor | Halves, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the weights [K, out, in, side, side], from all samples together."""
    parts = weight_parts(grad, x, 1, stride, weight.shape[4], weight.dtype)
    if parts.shape[2] == 1:
        return parts.view(weight.shape)
    found = weight.new_empty(weight.shape)
    _fold(parts, None, (found.flatten(1),))
    return found


def weight_parts(
    grad: Tensor | Halves,
    x: Tensor | Halves,
    n_envs: int,
    stride: int,
    side: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Parts [K, E, parts, out * in * taps], whose sum is each environment's gradient of the weights.

    The weights are [out, in, side, side], with side * side taps. A single part has the type `dtype`; several parts are
    float32.
    """
    left, right = operand(grad), operand(x)
    n_rows, shape = _shape_of(left, right, n_envs, stride, side)
    n_runs, n_out, n_weights = len(left.values), shape.n_out, side * side * shape.n_in
    tiles = (THIN_TILES if n_out <= THIN else TILES)[kind(x)]
    rows, depth = at_most(tiles.rows, n_out), at_most(tiles.depth, n_rows)
    columns = dividing(tiles.columns, shape.n_in) or at_most(tiles.columns, n_weights)
    programs = n_out // rows * triton.cdiv(n_weights, columns)
    longest = LONGEST_OF_FEW if n_weights <= FEW else LONGEST
    part = _part(n_rows, depth, n_runs * n_envs * programs, longest)
    n_parts = triton.cdiv(n_rows, part)
    kept = dtype if n_parts == 1 else torch.float32
    out = torch.empty(n_runs, n_envs, n_parts, n_out * n_weights, dtype=kept, device=left.values.device)
    launch: Any = _weight_kernel[(programs, n_envs * n_parts, n_runs)]
    numbers = (n_rows, part, n_rows % part == 0, *shape, rows, columns, depth, isinstance(x, Halves))
    launch(*left, *right, out, *numbers, **how(tiles))
    return out


def _part(n_rows: int, depth: int, programs: int, longest: int) -> int:
    """The number of pixels over which a program sums: a multiple of `depth`, equal for all parts but the last."""
    steps = triton.cdiv(n_rows, depth)
    wanted = min(triton.cdiv(PROGRAMS, programs), max(steps // SHORTEST, 1))
    return int(depth * triton.cdiv(steps, max(wanted, triton.cdiv(n_rows, longest))))


def _fold(parts: Tensor, unscale: Tensor | None, targets: Sequence[Tensor] | Tensor) -> None:
    """Write moments over environments to three targets, or only the mean to one target."""
    n_runs, n_envs, n_parts, n_weights = parts.shape
    signs, mean, m2 = targets if len(targets) == 3 else [targets[0]] * 3
    at_once = min(int(triton.next_power_of_2(n_parts)), 16)
    block = NUMBERS // at_once
    launch: Any = _fold_parts_kernel[(triton.cdiv(n_weights, block), n_runs)]
    scale = parts if unscale is None else unscale.contiguous()
    sizes = (n_weights, n_parts, mean.stride(0), n_envs, len(targets) == 1, unscale is not None, at_once, block)
    launch(parts, scale, signs, mean, m2, *sizes)


def _shape_of(grad: Operand, x: Operand, n_envs: int, stride: int, side: int) -> tuple[int, Shape]:
    """The number of output pixels of an environment, and the shape of the convolution."""
    n_samples, high, wide, n_out = grad.values.shape[-4:]
    height, width, n_in = x.values.shape[-3:]
    return n_samples // n_envs * high * wide, Shape(height, width, n_in, high, wide, n_out, stride, side)
