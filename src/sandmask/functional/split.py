"""float32 numbers as sums of two float16 numbers. Their products have float32's accuracy and run on tensor cores.

`high` is the float16 number nearest to a number, and `low` the float16 number nearest to the remainder. The product of
two numbers is high high' + high low' + low high', with a relative error of at most 2^-22. This is as exact as float32,
with three products of float16.

To stay in the range of float16, the numbers of a run are first scaled by a power of two, so that the largest number is
in 2^14 .. 2^15. Numbers down to 2^-17 of the largest keep all 22 bits. For smaller numbers, the error is 2^-40 of the
largest. The gradients of masks have a larger range: see `scaling`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_REMEMBERED = "_sandmask_largest"  # name of an attribute of tensors
_wanted = False


class Halves(NamedTuple):
    """Numbers of K runs: upper and lower halves [K, 2, ...] in float16, and the largest number [K] of each run."""

    values: Tensor
    largest: Tensor


def use_split_products(wanted: bool) -> None:
    """Set whether kernels multiply float32 numbers as three products of halves."""
    global _wanted  # noqa: PLW0603 - a setting of the process, like torch's `set_float32_matmul_precision`
    _wanted = wanted


def split_products() -> bool:
    """Whether kernels multiply float32 numbers as three products of halves."""
    return _wanted


def remember_largest(x: Tensor, largest: Tensor) -> None:
    """Attach the largest magnitudes [K] of x [K, ...] to x. Call this if the kernel that computes x also finds them."""
    setattr(x, _REMEMBERED, (_version(x), largest))


def largest_of(x: Tensor) -> Tensor:
    """The largest magnitude of each run's numbers x [K, ...].

    If they are remembered, and x was not changed in place since then, this needs no pass over x.
    """
    version, remembered = getattr(x, _REMEMBERED, (None, None))
    if remembered is not None and version == _version(x):
        known: Tensor = remembered
        return known
    largest: Tensor = torch.linalg.vector_norm(x.flatten(1), torch.inf, dim=1)
    return largest


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # noqa: SLF001 - torch has no public attribute for this


def plain_split(x: Tensor) -> Halves:
    """Halves of x [K, ...] in torch's operations."""
    largest = largest_of(x)
    scaled = torch.ldexp(x, (15 - torch.frexp(largest).exponent).view(-1, *[1] * (x.ndim - 1)))
    high = scaled.half()
    return Halves(torch.stack([high, (scaled - high).half()], dim=1), largest)


def joined(halves: Halves) -> Tensor:
    """The numbers [K, ...] that halves represent, in float64."""
    high, low = halves.values.double().unbind(1)
    exponent = torch.frexp(halves.largest).exponent - 15
    return torch.ldexp(high + low, exponent.view(-1, *[1] * (high.ndim - 1)))
