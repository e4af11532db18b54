"""Accuracies as what they are: counts over the size of a split. Exact, and small."""

from fractions import Fraction
from math import lcm

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
    counts = np.rint(accuracy * sizes).astype(np.int32).T
    changes = np.diff(counts, axis=1, prepend=np.int32(0))
    folded: NDArray[np.int32] = (changes << 1) ^ (changes >> 31)
    return folded.ravel()


def unpack(packed: NDArray[np.int32], sizes: NDArray[np.int64], runs: int = 1) -> NDArray[np.float64]:
    """The inverse of `pack`, bit for bit: [T, environments], or for several runs at once [runs, T, environments]."""
    changes = (packed >> 1) ^ -(packed & 1)
    counts = np.cumsum(changes.reshape(runs, len(sizes), -1), axis=2, dtype=np.int64)
    accuracy: NDArray[np.float64] = np.ascontiguousarray(counts.transpose(0, 2, 1)) / sizes
    return accuracy if runs > 1 else accuracy[0]
