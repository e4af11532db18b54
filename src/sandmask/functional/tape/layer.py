"""What a layer has to know of a `MomentTape`, to fold the gradients of its parameters into the tape's moments.

A kind of layer is a file: a function `layer(tape, *arguments)` that stands in for the one that was called, and a line
in the table `LAYERS` of `moment_tape`.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Place = tuple[int, int]  # where in the flat vector a parameter begins and ends


class UntapedError(Exception):
    """A parameter is used in a way that this tape knows nothing of."""


class Tape(Protocol):
    """As layers see it."""

    n_envs: int
    unscale: Tensor | None  # [K, E]: what gradients have to be multiplied with, where risks were scaled

    def claim(self, *params: Tensor | None) -> tuple[Place, ...]:
        """Where a layer's parameters are. Each may be claimed once, and all of a layer's have to be watched."""
        ...

    def check_rows(self, x: Tensor, ndim: int) -> None:
        """A layer's input should still have one row an example, those of an environment together."""
        ...

    def target(self, *places: Place) -> Tensor:
        """Where moments go that a layer computes itself: sums of signs, means and M2 [3, K, P]; of one place, its own.

        The layer has to write all of these places.
        """
        ...

    def fold(self, place: Place, gradients: Callable[[slice], Tensor]) -> None:
        """Fold `gradients(runs)` [k, E, ...] of some runs after the other into a parameter's moments."""
        ...
