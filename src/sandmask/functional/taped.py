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
    buffers: Tensor  # [3, K, P]: sums of signs, means, M2
    unscale: Tensor | None  # [K, E]: what gradients have to be multiplied with, where risks were scaled

    def claim(self, *params: Tensor | None) -> tuple[Place, ...]:
        """Where a layer's parameters are. Each may be claimed once, and all of a layer's have to be watched."""
        ...

    def check_rows(self, x: Tensor, ndim: int) -> None:
        """A layer's input should still have one row an example, those of an environment together."""
        ...

    def fold(self, place: Place, gradients: Callable[[slice], Tensor]) -> None:
        """Fold `gradients(runs)` [k, E, ...] of some runs after the other into a parameter's moments."""
        ...
