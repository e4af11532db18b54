"""Distributions of hyperparameters: frozen objects that print in the notation of the paper's table.

Every draw uses the NumPy call that DomainBed uses, so that equal seeds give equal values to the last bit.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from sandmask.errors import SandmaskError


class Distribution(ABC):
    """Draws one number from a random state; `str()` is the notation of the paper's hyperparameter table."""

    @property
    def integer(self) -> bool:
        """Whether the draws are whole numbers (Python `int`) rather than `float`."""
        return False

    @abstractmethod
    def draw(self, random: np.random.RandomState) -> float:
        """One value, a plain Python number."""


@dataclass(frozen=True)
class Constant(Distribution):
    """Always `value`."""

    value: float

    def __post_init__(self) -> None:
        _check_finite(self, value=self.value)

    @property
    def integer(self) -> bool:
        """Whether `value` was given as an `int`."""
        return isinstance(self.value, int)

    def draw(self, random: np.random.RandomState) -> float:  # noqa: ARG002
        """The value; takes nothing from the random state."""
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Uniform(Distribution):
    """U(low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self, self.low, self.high)

    def draw(self, random: np.random.RandomState) -> float:
        """A value in [low, high)."""
        return float(random.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"U({self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class LogUniform(Distribution):
    """base^U(low, high): `low` and `high` are exponents."""

    base: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self, self.low, self.high)
        _check_finite(self, base=self.base)
        if self.base <= 1:
            raise SandmaskError(f"{self!r}: base should be above 1.")

    def draw(self, random: np.random.RandomState) -> float:
        """`base` to a uniform power."""
        return float(self.base ** random.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"{self.base:g}^U({self.low:g}, {self.high:g})"


class _RoundedDown(Distribution):
    """The whole part of what the next class draws."""

    @property
    def integer(self) -> bool:
        """Always."""
        return True

    def draw(self, random: np.random.RandomState) -> float:
        """The whole part of a draw."""
        return int(super().draw(random))  # type: ignore[safe-super]  # there is a next class

    def __str__(self) -> str:
        return f"int {super().__str__()}"


class IntUniform(_RoundedDown, Uniform):
    """U(low, high), rounded down."""


class IntLogUniform(_RoundedDown, LogUniform):
    """base^U(low, high), rounded down."""


@dataclass(frozen=True, init=False)
class Choice(Distribution):
    """One of the given values, each as likely: `Choice(0.0, 0.1, 0.5)`."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", values)
        if not values:
            raise SandmaskError("Choice() has nothing to choose from. Give at least one value.")
        _check_finite(self, **{f"value {i + 1}": value for i, value in enumerate(values)})
        if len({type(value) for value in values}) > 1:
            raise SandmaskError(f"{self!r} mixes whole numbers and fractions. Write all as int or all as float.")

    @property
    def integer(self) -> bool:
        """Whether the values were given as `int`."""
        return isinstance(self.values[0], int)

    def draw(self, random: np.random.RandomState) -> float:
        """One of the values."""
        value: float = random.choice(list(self.values)).item()
        return value

    def __repr__(self) -> str:
        return f"Choice({', '.join(map(repr, self.values))})"

    def __str__(self) -> str:
        return "{" + ", ".join(f"{value:g}" for value in self.values) + "}"


def _check_finite(distribution: Distribution, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            kind = type(distribution).__name__
            raise SandmaskError(f"{kind}: {name} should be a finite number. Found {value!r}.")


def _check_range(distribution: Distribution, low: float, high: float) -> None:
    _check_finite(distribution, low=low, high=high)
    if low >= high:
        raise SandmaskError(f"{distribution!r}: low should be below high.")
