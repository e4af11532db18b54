"""Confidence intervals by resampling."""

import math
from collections.abc import Sequence

import numpy as np


def fewest_values(level: float = 0.95) -> int:
    """The fewest values that can support an interval at this level without assuming a distribution.

    The widest interval that n values give, from the smallest to the largest, misses the median with probability
    2 / 2^n. That is also the smallest p-value of the two-sided sign-flip test. At 95% it takes six values.
    """
    return math.ceil(round(1 - math.log2(1 - level), 9))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the mean, always the same for the same values.

    None for fewer than `fewest_values(level)` values: resampling them would give an interval that is far too narrow.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < fewest_values(level):
        return None
    rng = np.random.default_rng(seed)
    means = sample[rng.integers(0, len(sample), (resamples, len(sample)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
