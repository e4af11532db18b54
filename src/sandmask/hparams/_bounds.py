"""The values a hyperparameter may take at all, which is more than those a search draws."""

import math
from dataclasses import dataclass


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
FRACTION = Bounds(low=0, high=1)
POSITIVE_FRACTION = Bounds(low=0, high=1, open_low=True)
BELOW_ONE = Bounds(low=0, high=1, open_high=True)
