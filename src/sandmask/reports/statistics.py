"""Standard errors, intervals, paired comparisons and ranks. All random numbers are seeded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PairedComparison",
    "bootstrap_interval",
    "critical_difference",
    "fewest_values",
    "mean_and_error",
    "mean_ranks",
    "paired_comparison",
    "studentized_range",
]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of accuracies over trials and its standard error, both in percent.

    The error is the population standard deviation over sqrt(n). The order of operations is DomainBed's, because the
    last bit decides how a value half-way between two printed numbers is rounded.

    :param values: accuracies in 0..1.
    """
    sample = np.asarray(values, dtype=np.float64)
    return float(100 * np.mean(sample)), float(100 * np.std(sample / np.sqrt(len(sample))))


def fewest_values(level: float = 0.95) -> int:
    """Return the fewest values that can support an interval at this level without assuming a distribution.

    The widest interval of n values, from the smallest to the largest, misses the median with probability 2 / 2^n. This
    is also the smallest p-value of the two-sided sign-flip test. At 95%, six values are needed.

    :param level: confidence level.
    """
    return math.ceil(round(1 - math.log2(1 - level), 9))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of the mean; the same values give the same interval.

    It is None for fewer than `fewest_values(level)` values, whose interval would be far too narrow.

    :param values: the values.
    :param level: confidence level.
    :param resamples: number of resamples.
    :param seed: seed of the resampling.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < fewest_values(level):
        return None
    rng = np.random.default_rng(seed)
    means = sample[rng.integers(0, len(sample), (resamples, len(sample)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


EXACT_PAIRS = 14  # 16,384 sign patterns
_SAME = 1e-9  # relative difference that rounding may cause between equal numbers


@dataclass(frozen=True)
class PairedComparison:
    """Method minus baseline over pairs; the interval is None for fewer than six pairs (see `fewest_values`)."""

    pairs: int
    difference: float
    interval: tuple[float, float] | None
    p_value: float


def paired_comparison(
    method: Sequence[float], baseline: Sequence[float], *, resamples: int = 20_000, seed: int = 0
) -> PairedComparison:
    """Compare two methods that were measured under the same conditions, pair by pair.

    The p-value is that of the two-sided sign-flip permutation test: if the methods are equally good, either sign of a
    difference is equally likely. It is exact for up to 14 pairs and uses random sign patterns for more. The interval is
    the 95% bootstrap interval of the mean difference. Environments of one trial share training data, so pairs are not
    quite independent, and p-values are a little too small.

    :param method: values of the method.
    :param baseline: values of the baseline, in the same order.
    :param resamples: number of random sign patterns, for more than 14 pairs.
    :param seed: seed of the sign patterns and of the bootstrap interval.
    """
    if len(method) != len(baseline) or not len(method):
        raise ValueError(f"Expected equally many values and baseline values. Found {len(method)}, {len(baseline)}.")
    differences = np.asarray(method, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    return PairedComparison(
        pairs=len(differences),
        difference=float(differences.mean()),
        interval=bootstrap_interval(differences.tolist(), seed=seed),
        p_value=_sign_flip(differences, resamples, seed),
    )


def _sign_flip(differences: NDArray[np.float64], resamples: int, seed: int) -> float:
    count = len(differences)
    exact = count <= EXACT_PAIRS
    if exact:
        patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        patterns = np.random.default_rng(seed).integers(0, 2, (resamples, count))
    sums = np.abs((1 - 2 * patterns) @ differences)
    # Sums that are equal in exact arithmetic may differ in their last bits. They count as equal, also near zero.
    extreme = int((sums >= abs(differences.sum()) - _SAME * np.abs(differences).sum()).sum())
    return extreme / len(sums) if exact else (extreme + 1) / (resamples + 1)


def mean_ranks(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean rank of each method; 1 is the best, and ties share their ranks.

    :param scores: `[conditions, methods]`, larger is better. Scores that differ only in their last bits are ties.
    """
    above, same = scores[:, None, :] - scores[:, :, None], _SAME * np.abs(scores).max()
    greater, equal = (above > same).sum(axis=2), (np.abs(above) <= same).sum(axis=2)
    ranks: NDArray[np.float64] = (greater + (equal + 1) / 2).mean(axis=0)
    return ranks


def critical_difference(methods: int, conditions: int, *, alpha: float = 0.05) -> float:
    """Return Nemenyi's critical difference of mean ranks.

    Mean ranks that differ by less are not significantly different.

    :param methods: number of methods.
    :param conditions: number of conditions that they were ranked on.
    :param alpha: significance level.
    """
    return studentized_range(methods, 1 - alpha) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * conditions))


@cache
def studentized_range(groups: int, level: float) -> float:
    """Return a quantile of the range of standard normal values (infinite degrees of freedom).

    :param groups: number of values.
    :param level: probability that the range is smaller than the quantile.
    """
    low, high = 0.0, 20.0
    while high - low > 1e-8:
        middle = (low + high) / 2
        if _range_below(middle, groups) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _range_below(width: float, groups: int) -> float:
    """P(range < width): one value at z is the largest, all others lie within `width` below it."""
    grid = np.linspace(-8.0, 8.0 + width, 801)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    below = np.vectorize(NormalDist().cdf)
    integrand = groups * density * (below(grid) - below(grid - width)) ** (groups - 1)
    return float(integrand.sum() * (grid[1] - grid[0]))  # the integrand vanishes at both ends
