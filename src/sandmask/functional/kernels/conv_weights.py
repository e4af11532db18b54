"""The gradients of a convolution's weights, of K runs and by environment, as GPU kernels.

The gradient in each of E environments is a product of two matrices, and the masks need its moments over environments.
Computed tile by tile, with the loop over environments inside, the E gradients never exist in memory. A first layer's
few weights are one tile, for which one program would have to read everything: there, parts of the pixels are summed by
programs of their own. So they are in layers with large images, whose tiles are too few to occupy a GPU evenly.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.conv import Shape, first_tap, within
from sandmask.functional.kernels.moments import fold_runs, welford
from sandmask.functional.kernels.split import Operand, multiply, operand, unscaled
from sandmask.functional.kernels.tiles import SPLIT, Tiles, at_most, dividing, how, kind
from sandmask.functional.split import Halves

# By the kind of numbers. Of one or two environments a program keeps as many tiles in registers, of more it keeps 4.
FEW = {2: Tiles(64, 64, 64, 4, 4), 4: Tiles(64, 64, 32, 4, 3), SPLIT: Tiles(128, 64, 64, 8, 3)}
ONE = dict(FEW)
MANY = {2: Tiles(128, 64, 64, 8, 4), 4: Tiles(64, 32, 32, 4, 3), SPLIT: Tiles(128, 64, 64, 8, 3)}
PARTS = {2: Tiles(64, 64, 64, 4, 4), 4: Tiles(64, 64, 32, 4, 3), SPLIT: Tiles(64, 64, 64, 4, 3)}
LONG_PARTS = dict(PARTS)  # in a layer of many weights
PARTED = {2: False, 4: False, SPLIT: False}  # whether moments over environments are also found from parts
PART = 2048  # pixels that a program sums over in a layer of few weights
LONG = 32768  # the same in a layer of many, with more pixels than this
NARROW = 64  # weights of an output channel, up to which a layer has few


@triton.jit
def _weight_gradient(
    grad,
    grad_low,
    grad_largest,
    x,
    x_low,
    x_largest,
    unit,
    block,
    begin,
    n_rows,
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
    """[rows, columns] of grad^T x over the pixels `begin`, ..., `begin + n_rows - 1`."""
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, n_rows, depth):
        row = start + tl.arange(0, depth)
        known = (row < n_rows) | whole
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
            inside = known[:, None] & (number < side * side * n_in)[None, :] & within(y, height) & within(z, width)
            place = corner[:, None] + ((below * width + beside) * n_in + number % n_in)[None, :]
        value = tl.load(x + place, mask=inside, other=0.0)
        g_low, value_low = g, value
        if split:
            g_low = tl.load(grad + grad_low + at, mask=known[:, None], other=0.0)
            value_low = tl.load(x + x_low + place, mask=inside, other=0.0)
        total = multiply(tl.trans(g), tl.trans(g_low), value, value_low, total, split, precision)
    return unscaled(total, grad_largest, x_largest, split)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)


@triton.jit
def _weight_moments_kernel(
    grad,
    grad_run,
    grad_low,
    grad_largest,
    x,
    x_run,
    x_low,
    x_largest,
    unscale,
    signs_out,
    mean_out,
    m2_out,
    n_rows,
    out_run,
    n_envs: tl.constexpr,
    only_mean: tl.constexpr,
    scaled: tl.constexpr,
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
    """Moments over environments of the gradients of one tile of weights. They never are in memory."""
    run = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * rows + tl.arange(0, rows)
    block = tl.program_id(1)
    grad += run * grad_run
    x += run * x_run
    grad_largest += run
    x_largest += run
    unscale += run * n_envs
    mean = _weight_gradient(
        grad, grad_low, grad_largest, x, x_low, x_largest, unit, block, 0, n_rows, whole,
        height, width, n_in, high, wide, n_out, stride, side, rows, columns, depth, split, precision,
    )  # fmt: skip
    if scaled:
        mean *= tl.load(unscale)
    if n_envs == 2:  # this case apart, as of the first environment one tile is enough to remember
        second = _weight_gradient(
            grad, grad_low, grad_largest, x, x_low, x_largest, unit, block, n_rows, n_rows, whole,
            height, width, n_in, high, wide, n_out, stride, side, rows, columns, depth, split, precision,
        )  # fmt: skip
        if scaled:
            second *= tl.load(unscale + 1)
        signs = _sign(mean) + _sign(second)
        away = second - mean
        mean += away * 0.5
        m2 = away * away * 0.5  # a square: a product of two differences may be -0, which masks would divide by
    else:
        signs = _sign(mean)
        m2 = tl.zeros((rows, columns), tl.float32)
        for e in range(1, n_envs):
            product = _weight_gradient(
                grad, grad_low, grad_largest, x, x_low, x_largest, unit, block, e * n_rows, n_rows, whole,
                height, width, n_in, high, wide, n_out, stride, side, rows, columns, depth, split, precision,
            )  # fmt: skip
            if scaled:
                product *= tl.load(unscale + e)
            signs, mean, m2 = welford(product, e, signs, mean, m2)
    # The parameter is [out, in, side, side].
    taps: tl.constexpr = side * side
    column = block * columns + tl.arange(0, columns)
    place = run * out_run + unit[:, None] * (taps * n_in) + (column % n_in * taps + column // n_in)[None, :]
    inside = (column < taps * n_in)[None, :]
    tl.store(mean_out + place, mean, mask=inside)
    if not only_mean:
        tl.store(signs_out + place, signs, mask=inside)
        tl.store(m2_out + place, m2, mask=inside)


@triton.jit
def _weight_parts_kernel(
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
    """The gradient of one tile of weights, out of a part of one environment's pixels."""
    run = tl.program_id(2).to(tl.int64)
    taps: tl.constexpr = side * side
    blocks: tl.constexpr = (taps * n_in + columns - 1) // columns
    unit = tl.program_id(0) // blocks * rows + tl.arange(0, rows)
    block = tl.program_id(0) % blocks
    parts = tl.cdiv(n_rows, part)
    e, begin = tl.program_id(1) // parts, tl.program_id(1) % parts * part
    grad += run * grad_run
    x += run * x_run
    total = _weight_gradient(
        grad, grad_low, grad_largest + run, x, x_low, x_largest + run, unit, block,
        e * n_rows + begin, tl.minimum(n_rows - begin, part), False,
        height, width, n_in, high, wide, n_out, stride, side, rows, columns, depth, split, precision,
    )  # fmt: skip
    column = block * columns + tl.arange(0, columns)
    place = unit[:, None] * (taps * n_in) + (column % n_in * taps + column // n_in)[None, :]
    out += (run * tl.num_programs(1) + tl.program_id(1)) * (n_out * taps * n_in)
    tl.store(out + place, total, mask=(column < taps * n_in)[None, :])


def weight_moments(
    grad: Tensor | Halves,
    x: Tensor | Halves,
    unscale: Tensor | None,
    n_envs: int,
    stride: int,
    *targets: Tensor,
    side: int = 3,
) -> None:
    """Moments over environments of the gradients of the weights [out, in, side, side], from contiguous tensors.

    The N samples are those of one environment after the other. Targets are views [K, out * in * taps] of larger buffers
    [K, P]: sum of signs, mean and M2, or the mean alone, which of one environment is the gradient. Each environment's
    gradient is multiplied by `unscale` [K, E].
    """
    if len(targets) == 3 and PARTED[kind(x)]:
        gradients = weight_parts(grad, x, n_envs, stride, side).sum(2)
        fold_runs(gradients.unsqueeze(2), unscale, targets, gradients.shape[2])
        return
    left, right = operand(grad), operand(x)
    n_rows, shape = _shape_of(left, right, n_envs, stride, side)
    tiles = (ONE if n_envs == 1 else FEW if n_envs == 2 else MANY)[kind(x)]
    n_weights = side * side * shape.n_in
    columns = dividing(tiles.columns, shape.n_in) or at_most(tiles.columns, n_weights)
    rows, depth = at_most(tiles.rows, shape.n_out), at_most(tiles.depth, n_rows)
    signs, mean, m2 = targets if len(targets) == 3 else targets * 3
    programs = (shape.n_out // rows, triton.cdiv(n_weights, columns), len(left.values))
    launch: Any = _weight_moments_kernel[programs]
    sizes = (n_rows, mean.stride(0), n_envs, len(targets) == 1, unscale is not None, n_rows % depth == 0)
    scale = left.values if unscale is None else unscale.contiguous()
    numbers = (*sizes, *shape, rows, columns, depth, isinstance(x, Halves))
    launch(*left, *right, scale, signs, mean, m2, *numbers, **how(tiles))


def has_few_weights(n_in: int, side: int = 3) -> bool:
    """Whether `weight_parts` is for a layer of so many input channels, rather than `weight_moments`."""
    return side * side * n_in <= NARROW


def weight_parts(grad: Tensor | Halves, x: Tensor | Halves, n_envs: int, stride: int, side: int = 3) -> Tensor:
    """Parts [K, E, parts, out * in * taps] that sum to each environment's gradient of the weights.

    These are [out, in, side, side], with side * side taps.
    """
    left, right = operand(grad), operand(x)
    n_rows, shape = _shape_of(left, right, n_envs, stride, side)
    n_runs, n_out, n_weights = len(left.values), shape.n_out, side * side * shape.n_in
    few = has_few_weights(shape.n_in, side)
    tiles = (PARTS if few else LONG_PARTS)[kind(x)]
    rows, depth = at_most(tiles.rows, n_out), at_most(tiles.depth, n_rows)
    columns, part = at_most(NARROW, n_weights), PART
    if not few:
        columns = dividing(tiles.columns, shape.n_in) or columns
        part = depth * triton.cdiv(n_rows, depth * triton.cdiv(n_rows, LONG))  # parts of the same size
    parts = n_envs * triton.cdiv(n_rows, part)
    out = torch.empty(n_runs, n_envs, parts // n_envs, n_out * n_weights, device=left.values.device)
    launch: Any = _weight_parts_kernel[(n_out // rows * triton.cdiv(n_weights, columns), parts, n_runs)]
    numbers = (n_rows, part, *shape, rows, columns, depth, isinstance(x, Halves))
    launch(*left, *right, out, *numbers, **how(tiles))
    return out


def weight_gradient(grad: Tensor | Halves, x: Tensor | Halves, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the weights [K, out, in, side, side], from all samples together."""
    n_in, side = weight.shape[2], weight.shape[4]
    pixels = operand(grad).values.shape[-4:-1].numel()
    if has_few_weights(n_in, side) or pixels > LONG:
        return weight_parts(grad, x, 1, stride, side).sum((1, 2)).view(weight.shape).to(weight.dtype)
    found = weight.new_empty(weight.shape)
    weight_moments(grad, x, None, 1, stride, found.flatten(1), side=side)
    return found


def _shape_of(grad: Operand, x: Operand, n_envs: int, stride: int, side: int) -> tuple[int, Shape]:
    """The output pixels of an environment, and the shape of the convolution."""
    n_samples, high, wide, n_out = grad.values.shape[-4:]
    height, width, n_in = x.values.shape[-3:]
    return n_samples // n_envs * high * wide, Shape(height, width, n_in, high, wide, n_out, stride, side)
