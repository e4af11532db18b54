"""Random streams: bit for bit those of a Python twin, stable under padding, uniform and independent."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from sandmask.functional import random

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
seeds = st.integers(-(2**63), 2**63 - 1)
sizes = st.integers(1, 6)

Draw = Callable[..., Tensor]
DRAWS: dict[str, Draw] = {
    "keys": random.keys,
    "uniform": random.uniform,
    "normal": random.normal,
    "integers": lambda key, *shape: random.integers(key, 1000, *shape),
    "symmetric_beta": lambda key, *shape: random.symmetric_beta(key, torch.tensor(0.3), *shape),
}
EXACT = ("keys", "uniform", "integers")
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def assert_same_numbers(draw: Draw, one: Tensor, other: Tensor) -> None:
    """To the bit, or to rounding where there are logarithms."""
    if draw in [DRAWS[name] for name in EXACT]:
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def python_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def unsigned(key: Tensor) -> int:
    return int(key.item()) % WORD


@given(seeds)
def test_keys_are_the_first_numbers_of_splitmix64(seed: int) -> None:
    assert unsigned(random.key_of(seed)) == python_mix((seed + GOLDEN) % WORD)


def test_the_first_number_of_splitmix64_is_as_published() -> None:
    assert unsigned(random.key_of(0)) == 0xE220A8397B1DCDAF


@given(seeds, st.integers(0, 2**62))
def test_folding_is_the_same_for_integers_tensors_and_python(seed: int, data: int) -> None:
    key = random.key_of(seed)
    folded = random.fold(key, data)
    assert unsigned(folded) == python_mix((unsigned(key) + (data + 1) * GOLDEN) % WORD)
    assert torch.equal(folded, random.fold(key, torch.tensor(data)))


def test_uniform_numbers_are_the_upper_24_bits_of_the_keys() -> None:
    keys = random.keys(random.key_of(3), 50)
    expected = [(unsigned(key) >> 40) / 2**24 for key in keys]
    assert random.uniform(random.key_of(3), 50).tolist() == expected


@every_draw
@given(seeds, sizes, sizes, sizes, sizes)
def test_streams_are_prefix_stable_in_every_dimension(
    draw: Draw, seed: int, rows: int, columns: int, more_rows: int, more_columns: int
) -> None:
    key = random.key_of(seed)
    large = draw(key, rows + more_rows, columns + more_columns)
    assert_same_numbers(draw, large[:rows, :columns], draw(key, rows, columns))


@every_draw
def test_a_stack_of_keys_draws_what_each_draws_alone(draw: Draw) -> None:
    keys = random.keys(random.key_of(0), 4)
    alone = torch.stack([draw(key, 3, 2) for key in keys])
    assert_same_numbers(draw, vmap(lambda key: draw(key, 3, 2))(keys), alone)


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def assert_evenly_spread(numbers: Tensor, bins: int) -> None:
    """By a chi-square test, whose statistic has mean bins - 1 and variance 2 (bins - 1)."""
    statistic = chi_square(torch.bincount(numbers, minlength=bins).double())
    assert abs(statistic - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


def test_uniform_numbers_are_uniform_also_in_pairs() -> None:
    numbers = random.uniform(random.key_of(7), 200_000)
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert_evenly_spread((numbers * 64).long(), 64)
    cells = (numbers * 16).long()
    assert_evenly_spread(cells[0::2] * 16 + cells[1::2], 256)


@pytest.mark.parametrize("other", [1, 2, 100_000])
def test_streams_of_neighbouring_keys_are_independent(other: int) -> None:
    n = 100_000
    streams = {
        "folds": (random.fold(random.key_of(5), 0), random.fold(random.key_of(5), other)),
        "seeds": (random.key_of(5), random.key_of(5 + other)),
        "parent and child": (random.key_of(5), random.fold(random.key_of(5), other)),
    }
    for name, (one, two) in streams.items():
        a, b = random.uniform(one, n), random.uniform(two, n)
        assert not torch.equal(a, b), name
        for lag in (0, 1, 2):
            pair = torch.stack([a[: n - lag], b[lag:]]).double()
            assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(n), name
        assert_evenly_spread((a * 16).long() * 16 + (b * 16).long(), 256)


def test_neighbouring_rows_and_columns_are_independent() -> None:
    numbers = random.uniform(random.key_of(11), 300, 300).double()
    for a, b in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:]), (numbers, numbers.T)):
        off_diagonal = ~torch.eye(300, dtype=torch.bool) if a is numbers else torch.ones_like(a, dtype=torch.bool)
        assert abs(torch.corrcoef(torch.stack([a[off_diagonal], b[off_diagonal]]))[0, 1]) < 5 / 300


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    n = 200_000
    z = random.normal(random.key_of(2), n).double()
    assert z.isfinite().all()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert z.pow(power).mean().item() == pytest.approx(expected, abs=5 * math.sqrt(variance / n))
    inside = (z.abs() < 1).double().mean().item()
    assert inside == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.006)


@pytest.mark.parametrize("high", [1, 2, 7, 1024, 60_000])
def test_integers_are_whole_numbers_below_the_bound_evenly(high: int) -> None:
    numbers = random.integers(random.key_of(high), high, 20_000)
    assert numbers.dtype == torch.int64
    assert numbers.min() >= 0
    assert numbers.max() < high
    if 1 < high <= 1024:
        assert_evenly_spread(numbers, high)


def test_bounds_of_integers_may_be_tensors() -> None:
    highs = torch.tensor([[3], [50]])
    numbers = random.integers(random.key_of(0), highs, 2, 1000)
    assert numbers.amax(1).tolist() == [2, 49]
    assert torch.equal(numbers[1], random.integers(random.key_of(0), 50, 2, 1000)[1])


@given(seeds, st.integers(1, 40))
def test_permutations_hold_every_number_once(seed: int, n: int) -> None:
    assert sorted(random.permutation(random.key_of(seed), n).tolist()) == list(range(n))


def test_every_order_is_as_likely() -> None:
    keys = random.keys(random.key_of(0), 12_000)
    orders = vmap(lambda key: random.permutation(key, 4))(keys)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 24
    assert abs(chi_square(torch.tensor(list(counts.values())).double()) - 23) < 5 * math.sqrt(46)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0])
def test_beta_variates_have_the_distribution_of_numpys(alpha: float) -> None:
    n = 40_000
    ours = np.sort(random.symmetric_beta(random.key_of(1), torch.tensor(alpha), n).numpy().astype(np.float64))
    assert np.isfinite(ours).all()
    assert ours.min() >= 0
    assert ours.max() <= 1
    theirs = np.sort(np.random.RandomState(0).beta(alpha, alpha, n))
    # Away from 0 and 1, where a small alpha puts numbers that float32 cannot tell from the ends.
    grid = np.linspace(0.001, 0.999, 500)
    below = [np.searchsorted(sample, grid) / n for sample in (ours, theirs)]
    assert np.abs(below[0] - below[1]).max() < 1.95 * math.sqrt(2 / n)  # Kolmogorov-Smirnov at 0.1%
    assert ours.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


def gamma_by_trials(key: Tensor, alpha: float) -> float:
    """One variate's logarithm, trial after trial until one is accepted."""
    d = alpha + 2.0 / 3.0
    for i in range(12):
        x = float(random.normal(random.fold(key, 2 * i), 1))
        u = float(random.uniform(random.fold(key, 2 * i + 1), 1))
        v = (1.0 + x / math.sqrt(9.0 * d)) ** 3
        if v > 0 and math.log1p(-u) < 0.5 * x * x + d - d * v + d * math.log(v):
            break
    return math.log(d * v) + math.log1p(-float(random.uniform(random.fold(key, 24), 1))) / alpha


@pytest.mark.parametrize("alpha", [0.1, 0.7, 10.0])
def test_beta_variates_are_those_of_trial_after_trial(alpha: float) -> None:
    for seed in range(100):
        key = random.key_of(seed)
        first, second = (gamma_by_trials(random.fold(key, i), alpha) for i in (0, 1))
        expected = torch.sigmoid(torch.tensor(first - second))
        ours = random.symmetric_beta(key, torch.tensor(alpha), 1)[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
