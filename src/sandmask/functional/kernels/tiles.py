"""Tile sizes of matrix products in kernels, and the indices that a program processes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

from sandmask.functional.split import Halves

SPLIT = 0  # stands for halves, where tiles are otherwise chosen by the bytes of a number


class Tiles(NamedTuple):
    """The part of a product that one program computes, and the number of prefetched steps."""

    rows: int  # pixels; for gradients of weights, outputs
    columns: int  # output channels; for gradients, inputs
    depth: int  # number of products that are summed at a time
    warps: int
    stages: int


class Block(NamedTuple):
    """The number of numbers that a program of an elementwise operation processes."""

    numbers: int
    warps: int


class Passes(NamedTuple):
    """How a program iterates over the numbers of an image."""

    numbers: int  # processed at a time
    warps: int
    stages: int  # all but one are read ahead; with 1, the compiler decides


@triton.jit
def places(program, size: tl.constexpr, reach):
    """The indices program * size, ..., program * size + size - 1, in 64 bits if `reach` has 64 bits, otherwise in 32.

    Triton passes integers from 2^31 on in 64 bits. `reach` is the largest number of elements that are addressed. Short
    addresses therefore stay in 32 bits, and long addresses do not overflow.
    """
    return (program + (reach - reach)) * size + tl.arange(0, size)


def kind(x: Tensor | Halves) -> int:
    """The key by which tiles are chosen: the bytes of a number, or `SPLIT`."""
    return SPLIT if isinstance(x, Halves) else x.itemsize


def how(tiles: Tiles) -> dict[str, Any]:
    """Launch options other than the sizes of the tiles."""
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {"precision": precision, "num_warps": tiles.warps, "num_stages": tiles.stages}


def exact_on(x: Tensor) -> str:
    """The precision with which products of float32 numbers run on tensor cores and are as exact as float32.

    Each product is computed as six products of bfloat16 numbers. Older versions of Triton, and its interpreter, do not
    support this.
    """
    return "bf16x6" if x.is_cuda and "bf16x6" in CUDAOptions.allowed_dot_input_precisions else "ieee"


def at_most(most: int, size: int) -> int:
    """The smallest power of 2 that covers `size`, at least 16."""
    return min(most, max(int(triton.next_power_of_2(size)), 16))


def dividing(most: int, size: int) -> int:
    """The largest power of 2 that divides `size`; 0 if it is less than 16."""
    found = min(most, size & -size)
    return found if found >= 16 else 0
