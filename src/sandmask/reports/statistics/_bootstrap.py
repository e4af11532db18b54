"""Confidence intervals by resampling."""

from collections.abc import Sequence

import numpy as np


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the mean, always the same for the same values.

    None for fewer than two values, which say nothing about spread. With the usual three trials the interval
    is rough (ten distinct means at most) and narrower than it should be: read it as a lower bound.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = sample[rng.integers(0, len(sample), (resamples, len(sample)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
