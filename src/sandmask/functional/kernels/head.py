"""Layers with few outputs and many features, of K runs, as GPU kernels: forward, and both gradients in one pass.

Features may have a lower precision than the weights. Products are computed with the precision of float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.dense import saturated
from sandmask.functional.kernels.split import note_largest
from sandmask.functional.kernels.tiles import Tiles, at_most, exact_on, places
from sandmask.functional.split import remember_largest, split_products

# Tiles: a program processes some rows of the features, and sums logits over the columns.
LOGITS = Tiles(64, 64, 64, 4, 3)
GRADIENTS = Tiles(32, 64, 64, 2, 3)


@triton.jit
def _logits_kernel(
    x,
    weight,
    bias,
    out,
    n_rows,
    wide,
    n_in,
    n_classes,
    numel,
    classes: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    precision: tl.constexpr,
):
    """x W^T + b for some rows of one run."""
    run = tl.program_id(1).to(tl.int64)
    row = places(tl.program_id(0), rows, numel)
    label = tl.arange(0, classes)
    known, is_class = row < n_rows, label < n_classes
    x += run * numel
    weight += run * n_classes * n_in
    total = tl.zeros((rows, classes), tl.float32)
    for start in range(0, n_in, columns):
        column = start + tl.arange(0, columns)
        inside = known[:, None] & (column < wide)[None, :]
        value = tl.load(x + row[:, None] * wide + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = saturated(value, x.dtype.element_ty)
        is_weight = (column < n_in)[:, None] & is_class[None, :]
        w = tl.load(weight + label[None, :] * n_in + column[:, None], mask=is_weight, other=0.0)
        total = tl.dot(value, w, total, input_precision=precision)
    total += tl.load(bias + run * n_classes + label, mask=is_class, other=0.0)[None, :]
    out += run * n_rows * n_classes
    tl.store(out + row[:, None] * n_classes + label[None, :], total, mask=known[:, None] & is_class[None, :])


@triton.jit
def _gradients_kernel(
    grad,
    weighted,
    x,
    weight,
    of_x,
    sums,
    largest,
    n_rows,
    wide,
    n_in,
    n_classes,
    numel,
    part,
    classes: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    precision: tl.constexpr,
    notes: tl.constexpr,
):
    """The gradient of some features for a part of the rows, and the weights' gradient from these rows."""
    run, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * part
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    label = tl.arange(0, classes)
    end = tl.minimum(begin + part, n_rows)
    is_class, is_column = label < n_classes, column < wide
    grad += run * n_rows * n_classes
    weighted += run * n_rows * n_classes
    x += run * numel
    of_x += run * numel
    is_weight = is_class[:, None] & (column < n_in)[None, :]
    place = label[:, None] * n_in + column[None, :]
    w = tl.load(weight + run * n_classes * n_in + place, mask=is_weight, other=0.0)
    total = tl.zeros((classes, columns), tl.float32)
    for start in range(begin, end, rows):
        row = start + places(0, rows, numel)
        known = row < end
        of_label = known[:, None] & is_class[None, :]
        g = tl.load(grad + row[:, None] * n_classes + label[None, :], mask=of_label, other=0.0)
        h = tl.load(weighted + row[:, None] * n_classes + label[None, :], mask=of_label, other=0.0)
        features = row[:, None] * wide + column[None, :]
        inside = known[:, None] & is_column[None, :]
        value = saturated(tl.load(x + features, mask=inside, other=0.0).to(tl.float32), x.dtype.element_ty)
        total = tl.dot(tl.trans(h), value, total, input_precision=precision)
        gradient = saturated(tl.dot(g, w, input_precision=precision), of_x.dtype.element_ty)
        tl.store(of_x + features, gradient, mask=inside)
        if notes:
            note_largest(gradient, inside, largest + run)
    sums += (run * tl.num_programs(1) + tl.program_id(1)) * n_classes * n_in
    tl.store(sums + place, total, mask=is_weight)


def logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b in float32, of x [K, N, wide], weight [K, classes, in] and bias [K, classes]."""
    (n_runs, n_rows, wide), (_, n_classes, n_in) = x.shape, weight.shape
    out = torch.empty(n_runs, n_rows, n_classes, device=x.device)
    rows, classes = at_most(LOGITS.rows, n_rows), at_most(LOGITS.columns, n_classes)
    launch: Any = _logits_kernel[(triton.cdiv(n_rows, rows), n_runs)]
    sizes = (n_rows, wide, n_in, n_classes, n_rows * wide, classes, rows, LOGITS.depth)
    launch(x, weight, bias, out, *sizes, _precision(x), num_warps=LOGITS.warps, num_stages=LOGITS.stages)
    return out


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, part: int, weighted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the weights for `part` rows each, [K, parts, classes, in], from that of the logits.

    The gradient of the weights may be computed from another gradient of the logits, `weighted`.
    """
    (n_runs, n_rows, wide), (_, n_classes, n_in) = x.shape, weight.shape
    of_x = torch.empty_like(x)
    sums = torch.empty(n_runs, triton.cdiv(n_rows, part), n_classes, n_in, device=x.device)
    notes = split_products() and x.dtype == torch.float32  # for the layer before
    largest = torch.zeros(n_runs, device=x.device) if notes else sums
    most, columns, most_classes, warps, stages = GRADIENTS
    launch: Any = _gradients_kernel[(triton.cdiv(wide, columns), sums.shape[1], n_runs)]
    tile = (at_most(most_classes, n_classes), at_most(most, part), columns)
    sizes = (n_rows, wide, n_in, n_classes, n_rows * wide, part, *tile, _precision(x), notes)
    tensors = (grad, grad if weighted is None else weighted, x, weight, of_x, sums, largest)
    launch(*tensors, *sizes, num_warps=warps, num_stages=stages)
    if notes:
        remember_largest(of_x, largest)
    return of_x, sums


def _precision(x: Tensor) -> str:
    """The precision of products: as exact as float32 on tensor cores, unless every bit of float32 is needed."""
    exact = torch.get_float32_matmul_precision() == "highest" and not split_products()
    return "ieee" if exact else exact_on(x)
