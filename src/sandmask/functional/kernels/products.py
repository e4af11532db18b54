"""Products of matrices of K runs as GPU kernels, by halves: see `split`. Each kernel has an equivalent in torch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.dense import dropped
from sandmask.functional.kernels.split import multiply, note_largest, operand, unscaled
from sandmask.functional.kernels.tiles import Tiles, at_most, places
from sandmask.functional.split import Halves, remember_largest

# Deeper tiles are up to 13% faster, but tensor cores then add up more numbers at once, which is less exact.
FORWARD = Tiles(128, 64, 32, 4, 3)
BACKWARD = Tiles(64, 128, 32, 4, 3)
WEIGHTS = Tiles(128, 128, 64, 8, 3)


@triton.jit
def _product_kernel(
    a,
    a_run,
    a_low,
    a_largest,
    b,
    b_run,
    b_low,
    b_largest,
    bias,
    keys,
    rate,
    out,
    largest,
    n_rows,
    n_columns,
    n_deep,
    reach,
    a_row,
    a_deep,
    b_deep,
    b_column,
    site: tl.constexpr,
    biased: tl.constexpr,
    drops: tl.constexpr,
    relu: tl.constexpr,
    notes: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """relu(dropout(A B + bias)), or parts of this, for one tile of one run. `notes` adds the largest magnitude."""
    run = tl.program_id(2).to(tl.int64)
    row = places(tl.program_id(1), rows, reach)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    deep = places(0, depth, reach)
    a += run * a_run
    b += run * b_run
    is_row, is_column = (row < n_rows)[:, None], (column < n_columns)[None, :]
    left, right = row[:, None] * a_row, column[None, :] * b_column
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, n_deep, depth):
        place = start + deep
        known = place < n_deep
        at, is_a = left + place[None, :] * a_deep, is_row & known[None, :]
        to, is_b = right + place[:, None] * b_deep, is_column & known[:, None]
        v = tl.load(a + at, mask=is_a, other=0.0)
        w = tl.load(b + to, mask=is_b, other=0.0)
        v_low = tl.load(a + a_low + at, mask=is_a, other=0.0)
        w_low = tl.load(b + b_low + to, mask=is_b, other=0.0)
        total = multiply(v, v_low, w, w_low, total, True, "ieee")
    value = unscaled(total, a_largest + run, b_largest + run, True)
    if biased:
        value += tl.load(bias + run * n_columns + column, mask=column < n_columns, other=0.0)[None, :]
    if drops:
        drop = tl.load(rate + run)
        if drop > 0:
            key = tl.load(keys + run * n_rows + row, mask=row < n_rows, other=0)[:, None]
            value = dropped(value, key, column[None, :], drop, site)
    if relu:  # not tl.maximum, because NaN should propagate
        value = tl.where(value < 0, 0.0, value)
    if notes:
        note_largest(value, is_row & is_column, largest + run)
    out += run * n_rows * n_columns
    tl.store(out + row[:, None] * n_columns + column[None, :], value, mask=is_row & is_column)


def _launch(
    a: Halves,
    b: Halves,
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int, int],
    tiles: Tiles,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    rate: Tensor | None = None,
    site: int = 0,
    relu: bool = False,
    notes: bool = True,
) -> Tensor:
    (n_rows, n_columns, n_deep), n_runs = sizes, len(a.values)
    out = torch.empty(n_runs, n_rows, n_columns, device=a.values.device)
    largest = torch.zeros(n_runs, device=out.device) if notes else out
    rows, columns, depth = at_most(tiles.rows, n_rows), at_most(tiles.columns, n_columns), at_most(tiles.depth, n_deep)
    launch: Any = _product_kernel[(triton.cdiv(n_columns, columns), triton.cdiv(n_rows, rows), n_runs)]
    drops = keys is not None and rate is not None
    reach = max(n_rows * n_deep, n_columns * n_deep, n_rows * n_columns)
    launch(
        *(*operand(a), *operand(b)),
        out if bias is None else bias.contiguous(),
        out if keys is None else keys.contiguous(),
        out if rate is None else rate.float().contiguous(),
        *(out, largest, *sizes, reach, *strides),
        site=site,
        biased=bias is not None,
        drops=drops,
        relu=relu,
        notes=notes,
        rows=rows,
        columns=columns,
        depth=depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if notes:
        remember_largest(out, largest)
    return out


def layer(
    x: Halves,
    weight: Halves,
    bias: Tensor,
    keys: Tensor | None = None,
    rate: Tensor | None = None,
    site: int = 0,
    relu: bool = True,
) -> Tensor:
    """relu(dropout(x W^T + b)) of x [K, N, in], W [K, out, in] and b [K, out]. Without `relu`, x W^T + b."""
    n_rows, n_in = x.values.shape[2:]
    n_out = weight.values.shape[2]
    noise = (keys, rate, site) if relu else (None, None, 0)
    return _launch(x, weight, (n_rows, n_out, n_in), (n_in, 1, 1, n_in), FORWARD, bias, *noise, relu)


def input_gradient(grad: Halves, weight: Halves) -> Tensor:
    """g W of g [K, N, out] and W [K, out, in]."""
    n_rows, n_out = grad.values.shape[2:]
    n_in = weight.values.shape[3]
    return _launch(grad, weight, (n_rows, n_in, n_out), (n_out, 1, n_in, 1), BACKWARD)


def weight_gradient(grad: Halves, x: Halves) -> Tensor:
    """g^T x of g [K, N, out] and x [K, N, in]."""
    n_rows, n_out = grad.values.shape[2:]
    n_in = x.values.shape[3]
    return _launch(grad, x, (n_out, n_in, n_rows), (1, n_out, n_in, 1), WEIGHTS, notes=False)
