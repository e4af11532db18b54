"""Fold gradients into running moments in place: Welford's update and Chan's merge, on lists of tensors.

Every function takes lists and calls `torch._foreach_*`, so that a GPU needs few launches for a whole model.

Numbers are halved before they are subtracted: (g - mean) overflows for large values of opposite sign, and (g/2 -
mean/2) does not. Halving is exact (except for the last bit of denormal numbers), and equal values have a variance of
exactly 0. A sum of squares that overflows is inf, which every mask reads as no agreement in size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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

from sandmask.masks._functional import EPSILON, TensorMoments


@dataclass
class Sums:
    """The moments of a list of tensors, one entry per tensor."""

    sign_sum: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    m2: list[Tensor] = field(default_factory=list)
    log_sum: list[Tensor] | None = None

    def at(self, position: int, count: int) -> TensorMoments:
        """The moments of the tensor at one position, over `count` environments."""
        logs = None if self.log_sum is None else self.log_sum[position]
        return TensorMoments(count, self.sign_sum[position], self.mean[position], self.m2[position], logs)

    def append(self, moments: TensorMoments) -> None:
        """Add the moments of one more tensor."""
        self.sign_sum.append(moments.sign_sum)
        self.mean.append(moments.mean)
        self.m2.append(moments.m2)
        if self.log_sum is not None and moments.log_sum is not None:
            self.log_sum.append(moments.log_sum)

    def take(self, positions: Sequence[int]) -> "Sums":
        """The moments at these positions. The tensors are shared: changes in place also change this object."""
        return self._each(lambda tensors: [tensors[i] for i in positions])

    def clone(self) -> "Sums":
        """A copy that shares no memory."""
        return self._each(lambda tensors: [tensor.clone() for tensor in tensors])

    def _each(self, change: Callable[[list[Tensor]], list[Tensor]]) -> "Sums":
        logs = None if self.log_sum is None else change(self.log_sum)
        return Sums(change(self.sign_sum), change(self.mean), change(self.m2), logs)


def buckets(tensors: Mapping[int, tuple[str, int]], most: int) -> list[list[int]]:
    """Group the tensors of each kind into buckets of at most `most` elements, or of one larger tensor.

    :param tensors: index of each tensor -> its kind, such as device and dtype, and its number of elements.
    :param most: largest number of elements in a bucket.
    :return: the indices of the tensors in each bucket.
    """
    groups: list[list[int]] = []
    for kind in sorted({kind for kind, _ in tensors.values()}):
        group: list[int] = []
        size = 0
        for i in sorted(i for i, (of_kind, _) in tensors.items() if of_kind == kind):
            if group and size + tensors[i][1] > most:
                groups.append(group)
                group, size = [], 0
            group.append(i)
            size += tensors[i][1]
        groups.append(group)
    return groups


def fold_gradients(sums: Sums, grads: list[Tensor], count: int) -> None:
    """Add the gradients of environment number `count`; the first environment has number 1."""
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
    """Merge the moments of `other_count` environments into the moments of `count` environments."""
    total = count + other_count
    half = list(_foreach_mul(other.mean, 0.5))
    _foreach_sub_(half, sums.mean, alpha=0.5)
    _foreach_add_(sums.m2, other.m2)
    _foreach_addcmul_(sums.m2, half, half, value=4 * count * other_count / total)
    # Start from the mean of the larger side, so that the step is at most half the difference and cannot overflow.
    if other_count <= count:
        _foreach_add_(sums.mean, half, alpha=2 * other_count / total)
    else:
        _foreach_copy_(sums.mean, other.mean)
        _foreach_sub_(sums.mean, half, alpha=2 * count / total)
    _foreach_add_(sums.sign_sum, other.sign_sum)
    if sums.log_sum is not None and other.log_sum is not None:
        _foreach_add_(sums.log_sum, other.log_sum)
