"""Hidden layers of K runs as GPU kernels: layers with few inputs, activation and its gradient, padding."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.random import mix
from sandmask.functional.kernels.split import note_largest, scale_of
from sandmask.functional.kernels.tiles import Tiles, at_most, exact_on, places
from sandmask.functional.split import Halves, largest_of, remember_largest, split_products

BLOCK = 1024
NARROW = Tiles(64, 64, 32, 4, 1)  # tiles for a layer with few inputs
ACTIVATE_BACKWARD = Tiles(32, 128, 1, 4, 3)
LARGEST = tl.constexpr(65504.0)  # the largest float16 number


@triton.jit
def saturated(value, dtype: tl.constexpr):
    """The value, limited to the range of float16 if `dtype` is float16. NaN stays NaN."""
    if dtype == tl.float16:
        value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    return value


@triton.jit
def dropped(value, key, column, rate, site: tl.constexpr):
    """Dropout of units, given by the keys of their rows and the indices of their columns."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = mix(key.to(tl.uint64, bitcast=True) + tl.full((), (site + 1) * 0x9E3779B97F4A7C15 % 2**64, tl.uint64))
    noise = mix(key + (column + 1).to(tl.uint64) * golden) >> 40
    kept = noise.to(tl.float32) * (1.0 / 16777216.0) >= rate
    return tl.where(kept, value / (1.0 - rate), 0.0)


@triton.jit
def _activate_kernel(
    z,
    bias,
    rows,
    rate,
    largest,
    numel,
    width,
    n_rows,
    site: tl.constexpr,
    drops: tl.constexpr,
    notes: tl.constexpr,
    block: tl.constexpr,
):
    """z <- relu(dropout(z + bias)) in place. With `notes`, also note the largest magnitude."""
    run = tl.program_id(1).to(tl.int64)
    place = places(tl.program_id(0), block, numel)
    inside = place < numel
    column = place % width
    z += run * numel
    value = tl.load(z + place, mask=inside).to(tl.float32)
    value += tl.load(bias + run * width + column, mask=inside).to(tl.float32)
    if drops:
        drop = tl.load(rate + run)
        if drop > 0:
            key = tl.load(rows + run * n_rows + place // width, mask=inside, other=0)
            value = dropped(value, key, column, drop, site)
    # Not tl.maximum, because NaN should propagate.
    value = saturated(tl.where(value < 0, 0.0, value), z.dtype.element_ty)
    tl.store(z + place, value, mask=inside)
    if notes:
        tl.atomic_max(largest + run, tl.max(tl.where(inside, value, 0.0), axis=0), sem="relaxed")


@triton.jit
def _narrow_kernel(
    x,
    weight,
    bias,
    keys,
    rate,
    out,
    largest,
    n_rows,
    n_in,
    n_out,
    width,
    reach,
    x_run,
    x_row,
    weight_run,
    bias_run,
    site: tl.constexpr,
    drops: tl.constexpr,
    notes: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """relu(dropout(x W^T + b)) for one tile of one run, from all inputs at once."""
    run = tl.program_id(2).to(tl.int64)
    row = places(tl.program_id(1), rows, reach)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    deep = tl.arange(0, depth)
    is_row, is_column, is_deep = row < n_rows, column < n_out, deep < n_in
    x += run * x_run + row[:, None] * x_row + deep[None, :]
    weight += run * weight_run + column[:, None] * n_in + deep[None, :]
    v = tl.load(x, mask=is_row[:, None] & is_deep[None, :], other=0.0)
    w = tl.load(weight, mask=is_column[:, None] & is_deep[None, :], other=0.0)
    value = tl.dot(v, tl.trans(w), input_precision=precision)
    value += tl.load(bias + run * bias_run + column, mask=is_column, other=0.0)[None, :]
    if drops:
        drop = tl.load(rate + run)
        if drop > 0:
            key = tl.load(keys + run * n_rows + row, mask=is_row, other=0)[:, None]
            value = dropped(value, key, column[None, :], drop, site)
    value = tl.where(value < 0, 0.0, value)  # not tl.maximum, because NaN should propagate
    inside = is_row[:, None] & (column < width)[None, :]
    if notes:
        note_largest(value, inside, largest + run)
    tl.store(out + run * n_rows * width + row[:, None] * width + column[None, :], value, mask=inside)


@triton.jit
def _activate_backward_kernel(
    grad,
    out,
    rate,
    roots,
    largest,
    result,
    sums,
    n_rows,
    width,
    numel,
    part,
    drops: tl.constexpr,
    rooted: tl.constexpr,
    split: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """The gradient before bias, dropout and ReLU. A unit passes the gradient if it is positive, scaled as in dropout.

    A program processes some units of a part of the rows, and also sums over these rows. With `rooted`, rows are
    multiplied by their roots in the sums. With `split`, the result is in halves.
    """
    run, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * part
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    known = column < width
    end = tl.minimum(begin + part, n_rows)
    total = tl.zeros((rows, columns), tl.float32)
    grad += run * numel
    out += run * numel
    result += run * numel * (2 if split else 1)
    scale = 1.0
    if drops:
        scale = 1.0 - tl.load(rate + run)
    up = 1.0
    if split:
        up = scale_of(tl.load(largest + run))
    for start in range(begin, end, rows):
        row = start + places(0, rows, numel)
        inside = (row < end)[:, None] & known[None, :]
        place = row[:, None] * width + column[None, :]
        value = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
        if drops:
            value /= scale
        # The gradient of a NaN output is also NaN.
        value = tl.where(unit > 0, value, tl.where(unit == 0, 0.0, unit))
        if not split:
            value = saturated(value, result.dtype.element_ty)
        if rooted:
            total += value * tl.load(roots + run * n_rows + row, mask=row < end, other=0.0)[:, None]
        else:
            total += value
        if split:
            value *= up
            high = value.to(tl.float16)
            tl.store(result + place, high, mask=inside)
            tl.store(result + numel + place, (value - high.to(tl.float32)).to(tl.float16), mask=inside)
        else:
            tl.store(result + place, value, mask=inside)
    sums += (run * tl.num_programs(1) + tl.program_id(1)) * width
    tl.store(sums + column, tl.sum(total, axis=0), mask=known)


def activate(z: Tensor, bias: Tensor, rows: Tensor | None, rate: Tensor | None, site: int) -> Tensor:
    """relu(dropout(z + bias)) of z [K, N, width], in place. `rows` [K, N] are the keys of rows; rate is [K]."""
    n_runs, n_rows, width = z.shape
    launch: Any = _activate_kernel[(triton.cdiv(n_rows * width, BLOCK), n_runs)]
    keys, rates = (z, z) if rows is None or rate is None else (rows.contiguous(), rate.float().contiguous())
    notes = split_products() and z.dtype == torch.float32  # for the next layer
    largest = torch.zeros(n_runs, device=z.device) if notes else z
    how = {"site": site, "drops": rows is not None, "notes": notes, "block": BLOCK}
    launch(z, bias.contiguous(), keys, rates, largest, n_rows * width, width, n_rows, **how)
    if notes:
        remember_largest(z, largest)
    return z


def narrow_layer(
    x: Tensor, weight: Tensor, bias: Tensor, keys: Tensor | None, rate: Tensor | None, site: int, width: int
) -> Tensor:
    """relu(dropout(x W^T + b)) of x [K, N, in] with few inputs, in float32, padded with zeros to `width` units.

    The runs may share x. W [K, out, in] and b [K, out] may be views of longer vectors.
    """
    (n_runs, n_rows, _), (_, n_out, n_in) = x.shape, weight.shape
    x, weight, bias = (t if t[0].is_contiguous() else t.contiguous() for t in (x, weight, bias))
    out = torch.empty(n_runs, n_rows, width, device=x.device)
    notes = split_products()  # for the next layer
    largest = torch.zeros(n_runs, device=x.device) if notes else out
    drops = keys is not None and rate is not None
    rows, columns = at_most(NARROW.rows, n_rows), at_most(NARROW.columns, width)
    launch: Any = _narrow_kernel[(triton.cdiv(width, columns), triton.cdiv(n_rows, rows), n_runs)]
    launch(
        *(x, weight, bias),
        out if keys is None else keys.contiguous(),
        out if rate is None else rate.float().contiguous(),
        *(out, largest, n_rows, n_in, n_out, width, n_rows * max(width, x.stride(1))),
        *(x.stride(0), x.stride(1), weight.stride(0), bias.stride(0)),
        site=site,
        drops=drops,
        notes=notes,
        rows=rows,
        columns=columns,
        depth=at_most(NARROW.depth, n_in),
        precision=exact_on(x),
        num_warps=NARROW.warps,
    )
    if notes:
        remember_largest(out, largest)
    return out


def activate_backward(
    grad: Tensor, out: Tensor, rate: Tensor | None, part: int, roots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient with respect to z in `activate`, from its output, and its sums over every `part` rows.

    In these sums, rows are multiplied by their `roots` [K, N].
    """
    result = torch.empty_like(out)
    return result, _activate_backward(grad, out, rate, part, roots, result, None)


def activate_backward_halves(
    grad: Tensor, out: Tensor, rate: Tensor | None, part: int, roots: Tensor | None = None
) -> tuple[Halves, Tensor]:
    """`activate_backward` with the gradient in halves."""
    n_runs, n_rows, width = out.shape
    largest = largest_of(grad) if rate is None else largest_of(grad) / (1.0 - rate)
    result = torch.empty(n_runs, 2, n_rows, width, dtype=torch.float16, device=out.device)
    return Halves(result, largest), _activate_backward(grad, out, rate, part, roots, result, largest)


def _activate_backward(
    grad: Tensor,
    out: Tensor,
    rate: Tensor | None,
    part: int,
    roots: Tensor | None,
    result: Tensor,
    largest: Tensor | None,
) -> Tensor:
    n_runs, n_rows, width = out.shape
    sums = torch.empty(n_runs, triton.cdiv(n_rows, part), width, device=out.device)
    tiles = ACTIVATE_BACKWARD
    columns = at_most(tiles.columns, width)
    launch: Any = _activate_backward_kernel[(triton.cdiv(width, columns), sums.shape[1], n_runs)]
    launch(
        grad.contiguous(),
        out,
        out if rate is None else rate.float().contiguous(),
        out if roots is None else roots,
        out if largest is None else largest,
        *(result, sums, n_rows, width, n_rows * width, part),
        drops=rate is not None,
        rooted=roots is not None,
        split=largest is not None,
        rows=at_most(tiles.rows, part),
        columns=columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return sums


@triton.jit
def _pad_kernel(source, result, n_rows, n_columns, wide, numel, run_stride, block: tl.constexpr):
    run = tl.program_id(1).to(tl.int64)
    place = places(tl.program_id(0), block, numel)
    row, column = place // wide, place % wide
    known = (row < n_rows) & (column < n_columns)
    value = tl.load(source + run * run_stride + row * n_columns + column, mask=known, other=0.0)
    tl.store(result + run * numel + place, value, mask=place < numel)


def pad(matrices: Tensor, n_rows: int, n_columns: int) -> Tensor:
    """Pad matrices [K, rows, columns] with zeros at the end of rows and columns, by one kernel.

    Each matrix begins at a multiple of 16 bytes, which a GPU reads faster. Suitable matrices are returned unchanged.
    """
    begins = (matrices.data_ptr(), matrices.stride(0) * matrices.itemsize)
    if matrices.shape[1:] == (n_rows, n_columns) and all(begin % 16 == 0 for begin in begins):
        return matrices
    if matrices.stride(2) != 1 or matrices.stride(1) != matrices.shape[2]:
        matrices = matrices.contiguous()
    n_runs, own_rows, own_columns = matrices.shape
    result = torch.empty(n_runs, n_rows, n_columns, dtype=matrices.dtype, device=matrices.device)
    numel = n_rows * n_columns
    launch: Any = _pad_kernel[(triton.cdiv(numel, BLOCK), n_runs)]
    launch(matrices, result, own_rows, own_columns, n_columns, numel, matrices.stride(0), block=BLOCK)
    return result
