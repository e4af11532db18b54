"""A hyperparameter: its name, its default, its bounds, what a search draws it from, and where that holds."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

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
            raise SandmaskError(f"{self!r} mixes int and float. Write all values as int or all as float.")

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


@dataclass(frozen=True)
class Bounds:
    """An interval, each end included unless it is `open`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """Reads after "should be"."""
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
DEPTH = Bounds(low=1, high=1000)  # layers: a million of them take minutes to build and cannot train
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
    """The name of a scope, which may be given by its former name: "spirals" is "tabular", "mnist" is "small-image"."""
    return _FORMER_SCOPES.get(scope, scope)


@dataclass(frozen=True)
class Hparam:
    """One row of a hyperparameter table.

    `scope`, `dataset` and `space` limit where the row applies; `None` means everywhere. If several rows of one
    name apply, the last one is used, so exceptions come after the general row:

        Hparam("tau", 1.0, Uniform(0, 1)), Hparam("tau", 1.0, Uniform(0.5, 1), space="domainbed")

    `bounds` are the values that can be set by hand; a search may draw from fewer.
    `stream` names the random stream of the draw where it is not `name`. A default written as an `int` makes a
    hyperparameter of whole numbers.
    """

    name: str
    default: float
    draw: Distribution
    bounds: Bounds = ANY
    scope: Scope | None = None
    dataset: str | None = None
    space: SpaceName | None = None
    stream: str | None = None

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
        """Whether this row holds there."""
        return self.scope in (None, scope) and self.dataset in (None, dataset) and self.space in (None, space)

    def parse(self, value: object) -> float:
        """A value that a user gave, as text or number, checked: a plain `int` or `float`."""
        kind = "a whole number" if self.integer else "a finite number"
        number = _number(value)
        if number is None or not math.isfinite(number) or (self.integer and number != int(number)):
            raise SandmaskError(f"Hyperparameter {self.name!r} should be {kind}. Found {value!r}.")
        if number not in self.bounds:
            raise SandmaskError(f"Hyperparameter {self.name!r} should be {self.bounds}. Found {value!r}.")
        return int(number) if self.integer else float(number)


@dataclass(frozen=True)
class Like:
    """A hyperparameter with another's default, draw and bounds, drawn on its own: `Like("lr_g", "lr")`."""

    name: str
    other: str


def _number(value: object) -> float | None:
    """The number that `value` is or spells, or None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        return None
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return None
