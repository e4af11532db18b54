"""Moments over environments of gradients of K runs, as GPU kernels. Each kernel has an equivalent in torch.

`weight_moments` is the most important kernel. The gradient of a layer's weights in each of E environments is a product
of two matrices, and the masks need its moments over environments. The kernel computes them tile by tile, with the loop
over environments inside, so that the E gradients are never in memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.split import multiply, operand, unscaled
from sandmask.functional.kernels.tiles import SPLIT, Tiles, at_most, exact_on, kind, places
from sandmask.functional.split import Halves

BLOCK = 1024
NARROW = 32  # layers with at most this many inputs have their own tiles
# Tiles by the kind of numbers (see `tiles.kind`).
WEIGHT_MOMENTS = {2: Tiles(64, 64, 128, 4, 3), 4: Tiles(64, 64, 32, 4, 4), SPLIT: Tiles(64, 64, 32, 4, 4)}
NARROW_WEIGHT_MOMENTS = {**WEIGHT_MOMENTS, 4: Tiles(32, 32, 16, 2, 8)}
OUTER_MOMENTS = Tiles(16, 64, 1, 2, 3)


@triton.jit
def welford(value, e, signs, mean, m2):
    """Add one environment to the moments. If there is only one, or gradients are identical, M2 is exactly 0."""
    away = value - mean
    mean += away * (1.0 / (e + 1.0))  # one division for all elements
    m2 += away * (value - mean)
    signs += tl.where(value > 0, 1.0, 0.0) - tl.where(value < 0, 1.0, 0.0)
    return signs, mean, m2


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
    roots,
    unscale,
    signs_out,
    mean_out,
    m2_out,
    n_rows,
    n_out,
    n_in,
    wide_out,
    wide_in,
    reach,
    stride,
    n_envs: tl.constexpr,
    rows_per_step: tl.constexpr,
    at_once: tl.constexpr,
    scaled: tl.constexpr,
    rooted: tl.constexpr,
    split: tl.constexpr,
    precision: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
):
    """Moments over environments of x_e^T grad_e, for one tile of one run.

    x comes first, because tensor cores read the first factor from registers, where it is multiplied by `roots`.
    """
    run = tl.program_id(2).to(tl.int64)
    out_units = tl.program_id(0) * block_out + tl.arange(0, block_out)
    in_units = tl.program_id(1) * block_in + tl.arange(0, block_in)
    grad += run * grad_run
    x += run * x_run
    signs = tl.zeros((block_in, block_out), tl.float32)
    mean = tl.zeros((block_in, block_out), tl.float32)
    m2 = tl.zeros((block_in, block_out), tl.float32)
    # Loads may read the zeros of the padding, so bounds are known for 16 numbers at a time.
    is_in, is_out = (in_units < wide_in)[:, None], (out_units < wide_out)[None, :]
    rows = places(0, rows_per_step, reach)
    # The two loops are compiled as one, so that loads for the next environment begin before this environment is done.
    for e in tl.range(n_envs, flatten=True):
        product = tl.zeros((block_in, block_out), tl.float32)
        for start in range(0, 1 if at_once else n_rows, rows_per_step):
            row = e * n_rows + start + rows
            known = start + rows < n_rows
            is_v, is_g = known[None, :] & is_in, known[:, None] & is_out
            from_v, from_g = row[None, :] * wide_in + in_units[:, None], row[:, None] * wide_out + out_units[None, :]
            v = tl.load(x + from_v, mask=is_v, other=0.0)
            g = tl.load(grad + from_g, mask=is_g, other=0.0)
            v_low, g_low = v, g
            if split:
                v_low = tl.load(x + x_low + from_v, mask=is_v, other=0.0)
                g_low = tl.load(grad + grad_low + from_g, mask=is_g, other=0.0)
            if rooted:
                # Roots are squares, and in float16 by themselves beyond its range.
                root = tl.sqrt(tl.load(roots + run * n_envs * n_rows + row, mask=known, other=0.0)).to(v.dtype)[None, :]
                v, v_low = v * root * root, v_low * root * root
            product = multiply(v, v_low, g, g_low, product, split, precision)
        product = unscaled(product, grad_largest + run, x_largest + run, split)
        if scaled:
            product *= tl.load(unscale + run * n_envs + e)
        signs, mean, m2 = welford(product, e, signs, mean, m2)
    place = run * stride + out_units[None, :] * n_in + in_units[:, None]
    inside = (in_units < n_in)[:, None] & (out_units < n_out)[None, :]
    tl.store(signs_out + place, signs, mask=inside)
    tl.store(mean_out + place, mean, mask=inside)
    tl.store(m2_out + place, m2, mask=inside)


def weight_moments(
    grad: Tensor | Halves,
    x: Tensor | Halves,
    unscale: Tensor | None,
    n_envs: int,
    sizes: tuple[int, int],
    targets: Tensor,
    roots: Tensor | None = None,
) -> None:
    """Moments of grad_e^T x_e over environments, from grad [K, E * B, out] and x [K, E * B, in].

    `grad` and `x` are halves, or numbers of any precision; products of float32 have float32's precision. `sizes` are
    the numbers of outputs and inputs of the layer; `grad` and `x` may be wider. The rows of `x` are multiplied by
    `roots` [K, E * B], and the gradient of each environment by `unscale` [K, E]. The sum of signs, mean and M2 are
    written to `targets` [3, K, out * in], a view of a larger buffer [3, K, P].
    """
    split = isinstance(x, Halves)
    left, right = (operand(side if isinstance(side, Halves) else side.contiguous()) for side in (grad, x))
    n_runs, n_rows = len(right.values), right.values.shape[-2] // n_envs
    tiles = (NARROW_WEIGHT_MOMENTS if sizes[1] <= NARROW else WEIGHT_MOMENTS)[kind(x)]
    block_out, block_in = at_most(tiles.rows, sizes[0]), at_most(tiles.columns, sizes[1])
    rows_per_step = at_most(tiles.depth, n_rows)
    widths = (left.values.shape[-1], right.values.shape[-1])
    launch: Any = _weight_moments_kernel[(triton.cdiv(sizes[0], block_out), triton.cdiv(sizes[1], block_in), n_runs)]
    launch(
        *(*left, *right),
        left.values if roots is None else roots,
        left.values if unscale is None else unscale.contiguous(),
        *targets,
        *(n_rows, *sizes, *widths, n_envs * n_rows * max(widths), targets.stride(1)),
        n_envs=n_envs,
        rows_per_step=rows_per_step,
        at_once=n_rows <= rows_per_step,
        scaled=unscale is not None,
        rooted=roots is not None,
        split=split,
        precision=exact_on(right.values),
        block_out=block_out,
        block_in=block_in,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit
def _fold_runs_kernel(
    grads,
    unscale,
    signs_out,
    mean_out,
    m2_out,
    numel,
    width,
    wide,
    run_stride,
    env_stride,
    stride,
    n_envs: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    run = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < numel
    grads += run * run_stride + place // width * wide + place % width
    signs = tl.zeros((block,), tl.float32)
    mean = tl.zeros((block,), tl.float32)
    m2 = tl.zeros((block,), tl.float32)
    for e in range(n_envs):
        value = tl.load(grads + e * tl.cast(env_stride, tl.int64), mask=inside, other=0.0).to(tl.float32)
        if scaled:
            value *= tl.load(unscale + run * n_envs + e)
        signs, mean, m2 = welford(value, e, signs, mean, m2)
    place += run * stride
    tl.store(signs_out + place, signs, mask=inside)
    tl.store(mean_out + place, mean, mask=inside)
    tl.store(m2_out + place, m2, mask=inside)


def fold_runs(grads: Tensor, unscale: Tensor | None, targets: Tensor | Sequence[Tensor], width: int) -> None:
    """Moments over environments of gradients [K, E, rows, columns], equivalent to `masks.fold_runs`.

    They are written to `targets` [3, K, n] as in `weight_moments`. Only the first `width` columns of a row are used.
    """
    if grads.stride(3) != 1:
        grads = grads.contiguous()
    n_runs, n_envs, n_rows, _ = grads.shape
    launch: Any = _fold_runs_kernel[(triton.cdiv(n_rows * width, BLOCK), n_runs)]
    scale = grads if unscale is None else unscale.contiguous()
    strides = (grads.stride(2), grads.stride(0), grads.stride(1), targets[0].stride(0))
    how = {"n_envs": n_envs, "scaled": unscale is not None, "block": BLOCK}
    launch(grads, scale, *targets, n_rows * width, width, *strides, **how)


@triton.jit
def _outer_moments_kernel(
    head,
    products,
    unscale,
    signs_out,
    mean_out,
    m2_out,
    n_out,
    n_in,
    n_classes,
    stride,
    n_envs: tl.constexpr,
    scaled: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Moments over environments of V^T p_e, for one tile of one run."""
    run = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    head += run * n_classes * n_out
    products += run * n_envs * n_classes * n_in
    signs = tl.zeros((rows, columns), tl.float32)
    mean = tl.zeros((rows, columns), tl.float32)
    m2 = tl.zeros((rows, columns), tl.float32)
    for e in range(n_envs):
        value = tl.zeros((rows, columns), tl.float32)
        for c in range(n_classes):
            v = tl.load(head + c * n_out + row, mask=row < n_out, other=0.0)
            p = tl.load(products + (e * n_classes + c) * n_in + column, mask=column < n_in, other=0.0)
            value += v[:, None] * p[None, :]
        if scaled:
            value *= tl.load(unscale + run * n_envs + e)
        signs, mean, m2 = welford(value, e, signs, mean, m2)
    place = run * stride + row[:, None] * n_in + column[None, :]
    inside = (row < n_out)[:, None] & (column < n_in)[None, :]
    tl.store(signs_out + place, signs, mask=inside)
    tl.store(mean_out + place, mean, mask=inside)
    tl.store(m2_out + place, m2, mask=inside)


def outer_moments(head: Tensor, products: Tensor, unscale: Tensor | None, targets: Tensor) -> None:
    """Moments over environments of V^T p_e, from V [K, classes, out] and p [K, E, classes, in].

    They are scaled and written to `targets` [3, K, out * in] as in `weight_moments`.
    """
    (n_runs, n_envs, n_classes, n_in), n_out = products.shape, head.shape[2]
    rows, columns, _, warps, stages = OUTER_MOMENTS
    launch: Any = _outer_moments_kernel[(triton.cdiv(n_out, rows), triton.cdiv(n_in, columns), n_runs)]
    scale = products if unscale is None else unscale.contiguous()
    sizes = (n_out, n_in, n_classes, targets.stride(1), n_envs, unscale is not None, rows, columns)
    launch(head.contiguous(), products.contiguous(), scale, *targets, *sizes, num_warps=warps, num_stages=stages)
