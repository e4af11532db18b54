import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmask.errors import SandmaskError
from sandmask.hparams import (
    ANY,
    BELOW_ONE,
    COUNT,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    Bounds,
    Choice,
    Constant,
    Distribution,
    IntLogUniform,
    LogUniform,
    Uniform,
)

ALL: list[tuple[Distribution, str, str]] = [
    (Constant(0.0), "Constant(value=0.0)", "0"),
    (Uniform(0, 0.5), "Uniform(low=0, high=0.5)", "U(0, 0.5)"),
    (LogUniform(10, -4.5, -3.5), "LogUniform(base=10, low=-4.5, high=-3.5)", "10^U(-4.5, -3.5)"),
    (IntLogUniform(2, 3, 9), "IntLogUniform(base=2, low=3, high=9)", "int 2^U(3, 9)"),
    (Choice(0.0, 0.1, 0.5), "Choice(0.0, 0.1, 0.5)", "{0, 0.1, 0.5}"),
    (Choice(3, 4, 5), "Choice(3, 4, 5)", "{3, 4, 5}"),
]


@pytest.mark.parametrize(("distribution", "representation", "text"), ALL)
def test_prints_as_code_and_as_the_papers_table(distribution: Distribution, representation: str, text: str) -> None:
    assert repr(distribution) == representation
    assert str(distribution) == text
    names = {kind.__name__: kind for kind in (Constant, Uniform, LogUniform, IntLogUniform, Choice)}
    assert eval(representation, names) == distribution


@pytest.mark.parametrize("distribution", [row[0] for row in ALL])
def test_draws_are_plain_numbers_of_the_announced_type(distribution: Distribution) -> None:
    random = np.random.RandomState(0)
    kinds = {type(distribution.draw(random)) for _ in range(20)}
    assert kinds == {int if distribution.integer else float}


@given(seed=st.integers(0, 2**31 - 1))
def test_draws_make_the_numpy_call_that_the_protocol_names(seed: int) -> None:
    def state() -> np.random.RandomState:
        return np.random.RandomState(seed)

    assert Uniform(0, 0.5).draw(state()) == state().uniform(0, 0.5)
    assert LogUniform(10, -5, -3.5).draw(state()) == 10 ** state().uniform(-5, -3.5)
    assert IntLogUniform(2, 3, 5.5).draw(state()) == int(2 ** state().uniform(3, 5.5))
    assert Choice(0.0, 0.1, 0.5).draw(state()) == state().choice([0.0, 0.1, 0.5])
    assert Choice(3, 4, 5).draw(state()) == state().choice([3, 4, 5])


def test_a_constant_takes_nothing_from_the_random_state() -> None:
    random, untouched = np.random.RandomState(3), np.random.RandomState(3)
    assert Constant(8).draw(random) == 8
    assert random.uniform() == untouched.uniform()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1, 0), "low should be below high"),
        (lambda: Uniform(0, math.inf), "high should be a finite number. Found inf"),
        (lambda: LogUniform(1, 0, 1), "base should be above 1"),
        (lambda: IntLogUniform(2, math.nan, 1), "low should be a finite number"),
        (lambda: IntLogUniform(0, 0, 1), "base should be above 1"),
        (Choice, "no values to choose from"),
        (lambda: Choice(1, 0.5), "mixes int and float"),
        (lambda: Choice("a"), "value 1 should be a finite number. Found 'a'"),  # type: ignore[arg-type]
        (lambda: Constant(True), "value should be a finite number. Found True"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(SandmaskError, match=message):
        make()


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (ANY, [-1e9, 0, 1e9], [math.inf, math.nan], "a finite number"),
        (POSITIVE, [1e-300], [0, -1, math.inf], "above 0"),
        (NON_NEGATIVE, [0, 3], [-1e-9, math.nan], "at least 0"),
        (COUNT, [1, 7], [0], "at least 1"),
        (FRACTION, [0, 1], [-0.1, 1.1], "in [0, 1]"),
        (BELOW_ONE, [0, 0.999], [1], "in [0, 1)"),
        (Bounds(high=2, open_high=True), [1.9], [2], "below 2"),
        (Bounds(high=2), [2, -5], [2.1], "at most 2"),
        (Bounds(0, 1, open_low=True), [1], [0], "in (0, 1]"),
    ],
)
def test_bounds_know_their_ends(bounds: Bounds, inside: list[float], outside: list[float], text: str) -> None:
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in outside)
    assert str(bounds) == text
