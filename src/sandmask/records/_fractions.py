"""Accuracies as what they are: counts over the size of a split. Exact, and small."""

from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_SPLIT = 1_000_000


def denominators(runs: list[NDArray[np.float64]]) -> NDArray[np.int64] | None:
    """For each environment, the n that makes all accuracies of the [T, environments] tables fractions k / n.

    None where there is none up to `LARGEST_SPLIT`: then the values are not counts over a split.
    """
    found = np.ones(runs[0].shape[1], dtype=np.int64)
    for accuracy in runs:
        while True:
            unexplained = np.argwhere(~_explained(accuracy, found))
            if not len(unexplained):
                break
            checkpoint, environment = unexplained[0]
            part = Fraction(float(accuracy[checkpoint, environment])).limit_denominator(LARGEST_SPLIT).denominator
            common = lcm(int(found[environment]), part)
            # An unchanged denominator would mean that the value is no fraction at all.
            if common > LARGEST_SPLIT or common == found[environment]:
                return None
            found[environment] = common
    return found


def _explained(accuracy: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    exact: NDArray[np.bool_] = np.rint(accuracy * sizes) / sizes == accuracy
    return exact


def pack(accuracy: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """[T, environments] accuracies as changes of counts, environment after environment.

    Changes are small and many are zero; writing 0, -1, 1, -2, 2, ... as 0, 1, 2, 3, 4, ... leaves the
    upper bytes empty, which is what compresses.
    """
    return pack_counts(np.rint(accuracy * sizes))


def pack_counts(counts: NDArray[Any]) -> NDArray[np.int32]:
    """The same for [T, numbers] counts."""
    changes = np.diff(counts.astype(np.int32).T, axis=1, prepend=np.int32(0))
    folded: NDArray[np.int32] = (changes << 1) ^ (changes >> 31)
    return folded.ravel()


def unpack(packed: NDArray[np.int32], sizes: NDArray[np.int64], runs: int = 1) -> NDArray[np.float64]:
    """The inverse of `pack`, bit for bit: [T, environments], or for several runs at once [runs, T, environments]."""
    counts = _unfolded(packed.reshape(runs, len(sizes), -1))
    accuracy: NDArray[np.float64] = np.ascontiguousarray(counts.transpose(0, 2, 1)) / sizes
    return accuracy if runs > 1 else accuracy[0]


def unpack_counts(packed: NDArray[np.int32], rows: int) -> NDArray[np.int64]:
    """The inverse of `pack_counts`, for T `rows`."""
    return np.ascontiguousarray(_unfolded(packed.reshape(-1, max(rows, 1))).T)


def _unfolded(packed: NDArray[np.int32]) -> NDArray[np.int64]:
    """Counts from folded changes along the last dimension."""
    changes = (packed >> 1) ^ -(packed & 1)
    counts: NDArray[np.int64] = np.cumsum(changes, axis=-1, dtype=np.int64)
    return counts
