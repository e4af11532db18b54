"""Mean ranks over many conditions, and how far apart they have to be (Demšar, 2006)."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray


def mean_ranks(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean rank of each method in [conditions, methods]; 1 is the best, and ties share their ranks."""
    greater = (scores[:, None, :] > scores[:, :, None]).sum(axis=2)
    equal = (scores[:, None, :] == scores[:, :, None]).sum(axis=2)
    ranks: NDArray[np.float64] = (greater + (equal + 1) / 2).mean(axis=0)
    return ranks


def critical_difference(methods: int, conditions: int, *, alpha: float = 0.05) -> float:
    """Nemenyi's critical difference: mean ranks that differ by less are not told apart at level alpha."""
    return studentized_range(methods, 1 - alpha) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * conditions))


@cache
def studentized_range(groups: int, level: float) -> float:
    """The quantile of the range of `groups` standard normal values (infinite degrees of freedom)."""
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
    integrand = groups * density * (_normal(grid) - _normal(grid - width)) ** (groups - 1)
    return float(integrand.sum() * (grid[1] - grid[0]))  # it vanishes at both ends


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])
