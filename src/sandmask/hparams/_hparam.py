"""A hyperparameter: its name, default, bounds and distribution, and the datasets and spaces where these apply."""

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from sandmask.errors import SandmaskError


class Distribution(ABC):
    """Base class of distributions of a hyperparameter. `str()` uses the notation of the paper's table."""

    integer: bool = False
    """Whether draws are whole numbers (`int`) instead of `float`."""

    def draw(self, random: np.random.RandomState) -> float:
        """Draw one value as a Python number. Whole numbers are rounded down."""
        value = self._sample(random)
        return int(value) if self.integer else float(value)

    @abstractmethod
    def _sample(self, random: np.random.RandomState) -> float: ...


@dataclass(frozen=True)
class Constant(Distribution):
    """A distribution that always gives `value` and does not use the random state."""

    value: float

    def __post_init__(self) -> None:
        _check_finite(self, value=self.value)
        object.__setattr__(self, "integer", isinstance(self.value, int))

    def _sample(self, random: np.random.RandomState) -> float:  # noqa: ARG002
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Uniform(Distribution):
    """The uniform distribution U(low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self, self.low, self.high)

    def _sample(self, random: np.random.RandomState) -> float:
        return random.uniform(self.low, self.high)

    def __str__(self) -> str:
        return f"{'int ' if self.integer else ''}U({self.low:g}, {self.high:g})"


class IntUniform(Uniform):
    """The uniform distribution U(low, high), rounded down to whole numbers."""

    integer = True


@dataclass(frozen=True)
class LogUniform(Distribution):
    """The distribution base^U(low, high), where `low` and `high` are exponents."""

    base: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self, self.low, self.high)
        _check_finite(self, base=self.base)
        if self.base <= 1:
            raise SandmaskError(f"{self!r}: base should be above 1.")

    def _sample(self, random: np.random.RandomState) -> float:
        return float(self.base ** random.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"{'int ' if self.integer else ''}{self.base:g}^U({self.low:g}, {self.high:g})"


class IntLogUniform(LogUniform):
    """The distribution base^U(low, high), rounded down to whole numbers."""

    integer = True


@dataclass(frozen=True, init=False)
class Choice(Distribution):
    """One of the given values, all with the same probability: `Choice(0.0, 0.1, 0.5)`."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", values)
        if not values:
            raise SandmaskError("Choice() has no values to choose from. Give at least one value.")
        _check_finite(self, **{f"value {i + 1}": value for i, value in enumerate(values)})
        if len({type(value) for value in values}) > 1:
            raise SandmaskError(f"{self!r} mixes int and float. Write all values as int or all as float.")
        object.__setattr__(self, "integer", isinstance(values[0], int))

    def _sample(self, random: np.random.RandomState) -> float:
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


@dataclass(frozen=True)
class Bounds:
    """An interval. `low` and `high` are included unless `open_low` or `open_high` is set."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """Describe the bounds in words that follow "should be"."""
        if math.isinf(self.low) and math.isinf(self.high):
            return "a finite number"
        if math.isinf(self.high):
            return f"{'above' if self.open_low else 'at least'} {self.low:g}"
        if math.isinf(self.low):
            return f"{'below' if self.open_high else 'at most'} {self.high:g}"
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


ANY = Bounds()
POSITIVE = Bounds(low=0, open_low=True)
NON_NEGATIVE = Bounds(low=0)
COUNT = Bounds(low=1)
DEPTH = Bounds(low=1, high=1000)  # of layers
FRACTION = Bounds(low=0, high=1)
POSITIVE_FRACTION = Bounds(low=0, high=1, open_low=True)
BELOW_ONE = Bounds(low=0, high=1, open_high=True)


Scope = Literal["tabular", "small-image", "image"]
SpaceName = Literal["recipe", "paper", "domainbed"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_FORMER_SCOPES: dict[str, Scope] = {"spirals": "tabular", "mnist": "small-image"}
SPACES: tuple[SpaceName, ...] = get_args(SpaceName)
DEFAULT_SPACE: SpaceName = "recipe"


def scope_name(scope: str) -> str:
    """Return the current name of a scope: "tabular" for the former name "spirals", "small-image" for "mnist"."""
    return _FORMER_SCOPES.get(scope, scope)


@dataclass(frozen=True)
class Hparam:
    """One row of a hyperparameter table.

    `scope`, `dataset` and `space` limit where the row applies; `None` means everywhere. If several rows with the same
    name apply, the last one is used, so exceptions come after the general row:

        Hparam("tau", 1.0, Uniform(0, 1)), Hparam("tau", 1.0, Uniform(0.5, 1), space="domainbed")

    `bounds` are the values that can be set by hand; `draw` may have a smaller range. `stream` names the random stream
    of the draw if it is not `name`. If the default is an `int`, all values are whole numbers. `step` says that the
    value is a training step at which the method changes, such as the start of a penalty.
    """

    name: str
    default: float
    draw: Distribution
    bounds: Bounds = ANY
    scope: Scope | None = None
    dataset: str | None = None
    space: SpaceName | None = None
    stream: str | None = None
    step: bool = False

    def __post_init__(self) -> None:
        if self.scope is not None:
            object.__setattr__(self, "scope", scope_name(self.scope))
        if not self.name.isidentifier():
            raise SandmaskError(f"Hparam name {self.name!r} should be one word, such as 'lr'.")
        if self.integer != self.draw.integer:
            raise SandmaskError(
                f"Hparam {self.name!r}: the default {self.default!r} and the draw {self.draw!r} should "
                "both be int or both be float."
            )
        for field, value, known in (("scope", self.scope, SCOPES), ("space", self.space, SPACES)):
            if value not in (None, *known):
                raise SandmaskError(f"Hparam {self.name!r}: unknown {field} {value!r}. Choose from {known}.")
        self.parse(self.default)

    @property
    def integer(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.default, int)

    def applies(self, scope: Scope, dataset: str, space: SpaceName) -> bool:
        """Whether this row applies to a dataset in a space."""
        return self.scope in (None, scope) and self.dataset in (None, dataset) and self.space in (None, space)

    def parse(self, value: object) -> float:
        """Check a value that a user gave, as text or number, and return it as a plain `int` or `float`."""
        kind = "a whole number" if self.integer else "a finite number"
        number = _number(value)
        if number is None or not math.isfinite(number) or (self.integer and number != int(number)):
            raise SandmaskError(f"Hyperparameter {self.name!r} should be {kind}. Found {value!r}.")
        if number not in self.bounds:
            raise SandmaskError(f"Hyperparameter {self.name!r} should be {self.bounds}. Found {value!r}.")
        return int(number) if self.integer else float(number)


@dataclass(frozen=True)
class Like:
    """A hyperparameter with the default, distribution and bounds of another one: `Like("lr_g", "lr")`.

    It is drawn independently.
    """

    name: str
    other: str


def _number(value: object) -> float | None:
    """Convert a number or a text to a number; None for other values."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, str):
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return None
