"""Tile sizes of matrix products in kernels, and the places that a program works on."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

from sandmask.functional.split import Halves

SPLIT = 0  # stands for halves where tiles are chosen by the bytes of a number


class Tiles(NamedTuple):
    """The part of a product that one program computes, and the number of prefetched steps."""

    rows: int  # pixels; of weights, outputs
    columns: int  # output channels; of a gradient, inputs
    depth: int  # what is summed over at a time
    warps: int
    stages: int


class Block(NamedTuple):
    """How many numbers a program works on that treats each by itself."""

    numbers: int
    warps: int


class Passes(NamedTuple):
    """How a program goes through the numbers of an image."""

    numbers: int  # that it works on at a time
    warps: int
    stages: int  # of which all but one are read ahead; with 1 the compiler decides


@triton.jit
def places(program, size: tl.constexpr, reach):
    """The numbers program * size, ..., program * size + size - 1, in 64 bits where `reach` has as many, else in 32.

    Triton passes integers from 2^31 on in 64 bits. With `reach` the most numbers that addresses are computed for,
    short addresses stay short, and long ones do not overflow.
    """
    return (program + (reach - reach)) * size + tl.arange(0, size)


def kind(x: Tensor | Halves) -> int:
    """What tiles are chosen by: the bytes of a number, or `SPLIT`."""
    return SPLIT if isinstance(x, Halves) else x.itemsize


def how(tiles: Tiles) -> dict[str, Any]:
    """Launch options beside the sizes of the tiles."""
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {"precision": precision, "num_warps": tiles.warps, "num_stages": tiles.stages}


def exact_on(x: Tensor) -> str:
    """How products of float32 numbers run on tensor cores and are as exact as float32.

    That is as six products of bfloat16 numbers. Older versions of Triton, and its interpreter, lack them.
    """
    return "bf16x6" if x.is_cuda and "bf16x6" in CUDAOptions.allowed_dot_input_precisions else "ieee"


def at_most(most: int, size: int) -> int:
    """The smallest power of 2 that covers `size`, at least 16."""
    return min(most, max(int(triton.next_power_of_2(size)), 16))


def dividing(most: int, size: int) -> int:
    """The largest power of 2 that divides `size`; 0 where that is less than 16."""
    found = min(most, size & -size)
    return found if found >= 16 else 0
