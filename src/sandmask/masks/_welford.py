"""Fold gradients into running moments in place: Welford's update and Chan's merge, on lists of tensors.

Every function takes lists and works through `torch._foreach_*`, which on a GPU is a few launches for a
whole model.

Differences are halved before they are taken: (g - mean) overflows for large values of opposite sign, (g/2 -
mean/2) cannot. Halving is exact (but for the last bit of denormal numbers), and equal values keep a
variance of exactly 0. A sum of squares that overflows is inf, which every mask reads as "no agreement in
size".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import (
    Tensor,
    _foreach_abs,
    _foreach_add_,
    _foreach_addcmul_,
    _foreach_copy_,
    _foreach_log_,
    _foreach_mul,
    _foreach_sign,
    _foreach_sub_,
)

from sandmask.masks._functional import EPSILON

_BUCKET = 2**22


@dataclass
class Sums:
    """The moments of a list of tensors, position by position."""

    sign_sum: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    m2: list[Tensor] = field(default_factory=list)
    log_sum: list[Tensor] | None = None

    def take(self, positions: Sequence[int]) -> "Sums":
        """The moments at these positions; the tensors are shared, so that changes in place reach here."""
        return Sums(
            [self.sign_sum[i] for i in positions],
            [self.mean[i] for i in positions],
            [self.m2[i] for i in positions],
            None if self.log_sum is None else [self.log_sum[i] for i in positions],
        )

    def clone(self) -> "Sums":
        """A copy that shares nothing."""
        return Sums(
            [t.clone() for t in self.sign_sum],
            [t.clone() for t in self.mean],
            [t.clone() for t in self.m2],
            None if self.log_sum is None else [t.clone() for t in self.log_sum],
        )


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions grouped by device and dtype, at most about 4 million elements a group (or one larger tensor).

    A group shares each launch; the limit keeps temporaries small next to the model.
    """
    groups: list[list[int]] = []
    order = sorted(range(len(tensors)), key=lambda i: (str(tensors[i].device), str(tensors[i].dtype)))
    for _, alike in groupby(order, key=lambda i: (tensors[i].device, tensors[i].dtype)):
        group: list[int] = []
        size = 0
        for i in alike:
            if group and size + tensors[i].numel() > _BUCKET:
                groups.append(group)
                group, size = [], 0
            group.append(i)
            size += tensors[i].numel()
        groups.append(group)
    return groups


def fold_gradients(sums: Sums, grads: list[Tensor], count: int) -> None:
    """Fold in the gradients of environment number `count` (1 is the first)."""
    if count == 1:
        _foreach_copy_(sums.mean, grads)
        _foreach_copy_(sums.sign_sum, _foreach_sign(grads))
    else:
        half = list(_foreach_mul(grads, 0.5))
        _foreach_sub_(half, sums.mean, alpha=0.5)
        _foreach_add_(sums.mean, half, alpha=2 / count)
        _foreach_addcmul_(sums.m2, half, half, value=4 * (count - 1) / count)
        _foreach_add_(sums.sign_sum, _foreach_sign(grads))
    if sums.log_sum is not None:
        logs = list(_foreach_abs(grads))
        _foreach_add_(logs, EPSILON)
        _foreach_log_(logs)
        _foreach_add_(sums.log_sum, logs)


def fold_sums(sums: Sums, count: int, other: Sums, other_count: int) -> None:
    """Merge the moments of `other_count` further environments into those of `count`."""
    total = count + other_count
    half = list(_foreach_mul(other.mean, 0.5))
    _foreach_sub_(half, sums.mean, alpha=0.5)
    _foreach_add_(sums.m2, other.m2)
    _foreach_addcmul_(sums.m2, half, half, value=4 * count * other_count / total)
    # From the mean of the larger side, so that the step is at most half the difference and cannot overflow.
    if other_count <= count:
        _foreach_add_(sums.mean, half, alpha=2 * other_count / total)
    else:
        _foreach_copy_(sums.mean, other.mean)
        _foreach_sub_(sums.mean, half, alpha=2 * count / total)
    _foreach_add_(sums.sign_sum, other.sign_sum)
    if sums.log_sum is not None and other.log_sum is not None:
        _foreach_add_(sums.log_sum, other.log_sum)
