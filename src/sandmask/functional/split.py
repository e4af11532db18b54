"""float32 numbers as sums of two float16 ones, whose products keep float32's accuracy and run on tensor cores.

With `high` the nearest float16 of a number and `low` that of what is left, a product of two numbers is
high high' + high low' + low high' to within 2^-22 of it: as exact as in float32, by three products of float16. To stay
in float16's range, the numbers of a run are first scaled by the power of two that brings the largest of them to
2^14 .. 2^15. Numbers down to 2^-17 of the largest keep all 22 bits; the error of smaller ones is 2^-40 of the largest.
The gradients of masks have a larger range: see `scaling`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_REMEMBERED = "_sandmask_largest"  # an attribute of tensors
_wanted = False


class Halves(NamedTuple):
    """Numbers of K runs: upper and lower halves [K, 2, ...] in float16, and the largest number [K] of each run."""

    values: Tensor
    largest: Tensor


def use_split_products(wanted: bool) -> None:
    """Whether kernels are to multiply float32 numbers as three products of halves."""
    global _wanted  # noqa: PLW0603 - as torch's own `set_float32_matmul_precision`, a setting of the process
    _wanted = wanted


def split_products() -> bool:
    """Whether kernels multiply float32 numbers as three products of halves."""
    return _wanted


def remember_largest(x: Tensor, largest: Tensor) -> None:
    """Keep the largest magnitudes [K] of x [K, ...] with it, if the kernel that computed x has found them."""
    setattr(x, _REMEMBERED, (_version(x), largest))


def largest_of(x: Tensor) -> Tensor:
    """The largest magnitude of each run's numbers x [K, ...].

    Spares a pass over x if they are remembered, unless x was changed in place since then.
    """
    version, remembered = getattr(x, _REMEMBERED, (None, None))
    if remembered is not None and version == _version(x):
        known: Tensor = remembered
        return known
    largest: Tensor = torch.linalg.vector_norm(x.flatten(1), torch.inf, dim=1)
    return largest


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # noqa: SLF001 - torch has no other way to tell


def plain_split(x: Tensor) -> Halves:
    """Halves of x [K, ...] by torch's own operations."""
    largest = largest_of(x)
    scaled = torch.ldexp(x, (15 - torch.frexp(largest).exponent).view(-1, *[1] * (x.ndim - 1)))
    high = scaled.half()
    return Halves(torch.stack([high, (scaled - high).half()], dim=1), largest)


def joined(halves: Halves) -> Tensor:
    """The numbers [K, ...] that halves stand for, in float64."""
    high, low = halves.values.double().unbind(1)
    exponent = torch.frexp(halves.largest).exponent - 15
    return torch.ldexp(high + low, exponent.view(-1, *[1] * (high.ndim - 1)))
