"""Is a method better than the baseline? Differences on the same environments and trials."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sandmask.reports.statistics._bootstrap import bootstrap_interval

EXACT_PAIRS = 14  # 16,384 sign patterns


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
    """Compare two methods measured under the same conditions, pair by pair.

    The p-value is that of the two-sided sign-flip permutation test: if the methods were alike, each
    difference could as well have had the other sign. All sign patterns are tried for up to 14 pairs, random
    ones (seeded) for more. The interval is the 95% bootstrap interval of the mean difference. Environments
    of one trial share training data, so pairs are not quite independent, and p-values are a little too small.
    """
    if len(method) != len(baseline) or not len(method):
        raise ValueError(f"Expected as many values as baseline values, and some. Found {len(method)}, {len(baseline)}.")
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
    # Sums that are equal on paper differ in their last bits, and must count as equal.
    extreme = int((sums >= abs(differences.sum()) * (1 - 1e-9) - 1e-15).sum())
    return extreme / len(sums) if exact else (extreme + 1) / (resamples + 1)
