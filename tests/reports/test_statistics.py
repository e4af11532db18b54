"""The statistics against naive formulas and published tables."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmask.reports.statistics import (
    bootstrap_interval,
    critical_difference,
    fewest_values,
    mean_and_error,
    mean_ranks,
    paired_comparison,
    studentized_range,
)

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(accuracies)
def test_the_error_is_the_population_deviation_over_root_n(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    average = sum(values) / len(values)
    deviation = math.sqrt(sum((value - average) ** 2 for value in values) / len(values))
    assert mean == pytest.approx(100 * average)
    assert error == pytest.approx(100 * deviation / math.sqrt(len(values)), abs=1e-9)


def test_a_single_trial_has_no_spread() -> None:
    assert mean_and_error([0.5]) == (50.0, 0.0)
    assert bootstrap_interval([0.5]) is None


def test_the_bootstrap_interval_approaches_the_exact_one() -> None:
    values = [0.1, 0.4, 0.45, 0.9]
    means = sorted(sum(sample) / 4 for sample in itertools.product(values, repeat=4))
    interval = bootstrap_interval(values, level=0.8, resamples=200_000)
    assert interval == pytest.approx(np.quantile(means, [0.1, 0.9]), abs=0.01)
    assert bootstrap_interval(values, level=0.8) == bootstrap_interval(values, level=0.8)
    other = bootstrap_interval(values, level=0.8, resamples=100, seed=1)
    assert bootstrap_interval(values, level=0.8, resamples=100) != other


@pytest.mark.parametrize(("level", "count"), [(0.5, 2), (0.8, 4), (0.9, 5), (0.95, 6), (0.99, 8)])
def test_an_interval_needs_as_many_values_as_a_test_at_its_level(level: float, count: int) -> None:
    assert fewest_values(level) == count
    assert paired_comparison([0.9] * count, [0.5] * count).p_value <= 1 - level + 1e-12
    assert paired_comparison([0.9] * (count - 1), [0.5] * (count - 1)).p_value > 1 - level
    values = np.linspace(0.2, 0.9, count).tolist()
    assert bootstrap_interval(values, level=level) is not None
    assert bootstrap_interval(values[1:], level=level) is None


def test_two_pairs_have_a_p_value_and_no_interval() -> None:
    comparison = paired_comparison([0.524, 0.504], [0.5, 0.5])
    assert comparison.p_value == 0.5
    assert comparison.interval is None


def slow_p_value(differences: list[float]) -> float:
    observed = abs(sum(differences))
    signs = list(itertools.product([1, -1], repeat=len(differences)))
    flipped = [abs(sum(s * d for s, d in zip(pattern, differences, strict=True))) for pattern in signs]
    return sum(value >= observed - 1e-9 for value in flipped) / len(signs)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=9))
def test_the_exact_test_tries_every_sign(counts: list[int]) -> None:
    differences = [count / 37 for count in counts]
    comparison = paired_comparison([0.5 + value for value in differences], [0.5] * len(differences))
    assert comparison.pairs == len(differences)
    assert comparison.difference == pytest.approx(sum(differences) / len(differences))
    assert comparison.p_value == pytest.approx(slow_p_value(differences))


def test_the_sampled_test_agrees_with_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    method, baseline = rng.random(12).tolist(), (rng.random(12) * 0.8).tolist()
    exact = paired_comparison(method, baseline).p_value
    monkeypatch.setattr("sandmask.reports.statistics.EXACT_PAIRS", 0)
    sampled = paired_comparison(method, baseline).p_value
    assert sampled == pytest.approx(exact, abs=0.01)
    assert sampled == paired_comparison(method, baseline).p_value


def test_rounding_does_not_break_ties() -> None:
    eighteenths = [9, -1, 18, 1, -9, -2, -13, 6, 1, -7, -1, -2]  # their sum is 0, and in floats it is not
    assert paired_comparison([100 * n / 18 for n in eighteenths], [0.0] * 12).p_value == 1.0
    assert mean_ranks(np.array([[0.1 + 0.2, 0.3]])).tolist() == [1.5, 1.5]


def test_clear_and_absent_differences() -> None:
    assert paired_comparison([0.9] * 10, [0.5] * 10).p_value == 2 / 2**10
    assert paired_comparison([0.5] * 10, [0.5] * 10).p_value == 1.0
    assert paired_comparison([0.9] * 100, [0.5] * 100).p_value == pytest.approx(1 / 20_001)
    assert paired_comparison([0.9], [0.5]).interval is None
    with pytest.raises(ValueError, match="Found 1, 2"):
        paired_comparison([0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match="Found 0, 0"):
        paired_comparison([], [])


def slow_ranks(row: list[float]) -> list[float]:
    ordered = sorted(row, reverse=True)
    return [np.mean([place + 1 for place, other in enumerate(ordered) if other == value]) for value in row]  # type: ignore[misc]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 999))
def test_ranks_with_ties_are_shared(conditions: int, methods: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 4, (conditions, methods)) / 4
    expected = np.mean([slow_ranks(row) for row in scores.tolist()], axis=0)
    assert mean_ranks(scores) == pytest.approx(expected)
    assert mean_ranks(scores).sum() == pytest.approx(methods * (methods + 1) / 2)


@pytest.mark.parametrize(
    ("methods", "five", "ten"),
    [
        (2, 1.960, 1.645),
        (3, 2.343, 2.052),
        (4, 2.569, 2.291),
        (5, 2.728, 2.459),
        (7, 2.949, 2.693),
        (10, 3.164, 2.920),
    ],
)
def test_critical_values_are_the_published_ones(methods: int, five: float, ten: float) -> None:
    assert studentized_range(methods, 0.95) / math.sqrt(2) == pytest.approx(five, abs=0.0015)
    assert studentized_range(methods, 0.90) / math.sqrt(2) == pytest.approx(ten, abs=0.0015)


def test_the_critical_difference_of_a_published_example() -> None:
    # Demšar (2006), section 3.2.2: four classifiers on fourteen datasets, 1.25 at 0.05 and 1.12 at 0.10.
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, alpha=0.1) == pytest.approx(1.12, abs=0.005)
