"""Halves of float32 numbers in GPU kernels: conversion and multiplication. See `functional.split`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.tiles import Block, places
from sandmask.functional.split import Halves, largest_of

BLOCK = Block(1024, 4)


class Operand(NamedTuple):
    """A tensor of K runs as an argument of kernels: halves, or numbers of any type."""

    values: Tensor
    run: int  # offset from one run to the next
    low: int  # offset from the upper halves to the lower halves; 0 for numbers that are not split
    largest: Tensor


def operand(x: Tensor | Halves) -> Operand:
    """Convert x [K, ...] to an argument of kernels."""
    if isinstance(x, Halves):
        return Operand(x.values, x.values.stride(0), x.values.stride(1), x.largest)
    return Operand(x, x.stride(0), 0, x)


@triton.jit
def exponent_of(number):
    """The stored exponent of float32 numbers, which is 127 more than the exponent."""
    return (number.to(tl.int32, bitcast=True) >> 23) & 0xFF


@triton.jit
def power_of(exponent):
    """Two to the power of a stored exponent, from 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest):
    """The power of two by which a run's largest number becomes 2^14 .. 2^15."""
    return power_of(tl.minimum(268 - exponent_of(largest), 253))


@triton.jit
def multiply(a, a_low, b, b_low, total, split: tl.constexpr, precision: tl.constexpr):
    """Add a product of matrices to `total`.

    Tensor cores round sums towards zero, so errors accumulate in long sums. Therefore, each product of halves starts
    from zero and is added to `total` separately.
    """
    if split:
        part = tl.dot(a_low, b)
        part = tl.dot(a, b_low, part)
        total += tl.dot(a, b, part)
    else:
        total = tl.dot(a, b, total, input_precision=precision)
    return total


@triton.jit
def unscaled(total, a_largest, b_largest, split: tl.constexpr):
    """The product of two operands of a run, from the total of `multiply`.

    The total is divided by both scales in two equal steps. Dividing by one scale after the other could overflow.
    """
    if split:
        of_a, of_b = exponent_of(tl.load(a_largest)), exponent_of(tl.load(b_largest))
        exponent = tl.maximum(of_a - 14, 1) + tl.maximum(of_b - 14, 1)
        total *= power_of(exponent >> 1)
        total *= power_of(exponent - (exponent >> 1))
    return total


@triton.jit
def note_largest(value, inside, largest):
    """Update the largest magnitude of a run, which is initially zero, with the numbers of a tile."""
    magnitude = tl.where(inside, tl.abs(value), 0.0)
    tl.atomic_max(largest, tl.max(tl.max(magnitude, axis=1), axis=0), sem="relaxed")


@triton.jit
def _split_kernel(x, largest, out, n_rows, n_columns, wide, numel, x_run, flat: tl.constexpr, block: tl.constexpr):
    run = tl.program_id(1).to(tl.int64)
    place = places(tl.program_id(0), block, numel)
    inside = place < numel
    x += run * x_run
    if flat:
        value = tl.load(x + place, mask=inside, other=0.0)
    else:
        row, column = place // wide, place % wide
        value = tl.load(x + row * n_columns + column, mask=(row < n_rows) & (column < n_columns), other=0.0)
    value *= scale_of(tl.load(largest + run))
    high = value.to(tl.float16)
    out += 2 * run * numel
    tl.store(out + place, high, mask=inside)
    tl.store(out + numel + place, (value - high.to(tl.float32)).to(tl.float16), mask=inside)


def split(x: Tensor, n_rows: int | None = None, n_columns: int | None = None) -> Halves:
    """Halves of x [K, ...]. Matrices [K, rows, columns] may be padded with zeros at the end of rows and columns.

    If all runs share x, they also share the halves, with a stride of 0.
    """
    n_runs = len(x)
    one = x[:1] if x.stride(0) == 0 else x
    if not one[0].is_contiguous():
        one = one.contiguous()
    largest = largest_of(one)
    flat = n_rows is None or n_columns is None or x.shape[1:] == (n_rows, n_columns)
    shape = x.shape[1:] if n_rows is None or n_columns is None else torch.Size((n_rows, n_columns))
    values = torch.empty(len(one), 2, *shape, dtype=torch.float16, device=x.device)
    numel = shape.numel()
    own_rows, own_columns, wide = (1, 1, 1) if flat else (*x.shape[1:], shape[1])
    launch: Any = _split_kernel[(triton.cdiv(numel, BLOCK.numbers), len(one))]
    how = {"flat": flat, "block": BLOCK.numbers, "num_warps": BLOCK.warps}
    launch(one, largest, values, own_rows, own_columns, wide, numel, one.stride(0), **how)
    return Halves(values.expand(n_runs, *values.shape[1:]), largest.expand(n_runs).contiguous())
