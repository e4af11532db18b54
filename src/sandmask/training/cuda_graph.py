"""The state of a stack and the program that advances it: eager, or as CUDA graphs.

Small models leave a GPU idle while the host launches hundreds of kernels per step. A CUDA graph launches several steps
at once, with the same results.
"""

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._text import first_line
from sandmask.algorithms import Metrics, State
from sandmask.functional import EnvBatch
from sandmask.training.averaging import where
from sandmask.training.stack import Stack

LONGEST = 10  # steps in one graph
TURN_SECONDS = 1.0  # approximate time between checks for interrupts, if the runs of a stack take turns
WARM_UPS = 2  # calls before a capture, which compile kernels and allocate workspaces


@dataclass
class Carry:
    """The tensors that change while a stack trains, with a leading dimension K."""

    state: State
    sums: Metrics  # sums of the metrics since the last evaluation; empty before the first step
    diverged_at: Tensor  # the first step with a NaN or infinite loss; -1 if there is none

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"state": self.state, "sums": self.sums, "diverged_at": self.diverged_at}

    @property
    def done(self) -> int:
        """The number of steps taken. Waits for the device."""
        return int(self.state["step"][0])


def advance(stack: Stack, carry: Carry, batches: Iterable[EnvBatch]) -> Carry:
    """Take a step on each batch, and return the new carry."""
    state, metrics_of_steps = stack.steps(carry.state, batches)
    for number, metrics in enumerate(metrics_of_steps):
        done = carry.state["step"] + number
        # Sums start over after an evaluation. This depends only on the step, so a resumed run gives the same sums.
        fresh = (done == 0) | ((done - 1) % stack.specs[0].checkpoint_every == 0)
        first_bad = (carry.diverged_at < 0) & ~torch.isfinite(metrics["loss"])
        sums = {name: where(fresh, new, carry.sums.get(name, new) + new) for name, new in metrics.items()}
        carry = Carry(carry.state, sums, torch.where(first_bad, done, carry.diverged_at))
    return replace(carry, state=state)


class Program:
    """Takes steps and evaluates runs.

    With `fast`, steps and evaluations are CUDA graphs on a GPU. If the capture fails, the program warns and runs
    eagerly.
    """

    def __init__(self, stack: Stack, carry: Carry, *, fast: bool = True) -> None:
        self.stack = stack
        self.carry = carry
        self.done = carry.done  # includes steps that are queued on the device
        every = stack.specs[0].checkpoint_every
        self.chunk = max(n for n in range(1, LONGEST + 1) if every % n == 0)  # fits evenly between two evaluations
        self._seconds = math.inf  # duration of the last step on a CPU
        self._captures = fast and stack.device.type == "cuda" and stack.algorithm.captures
        self._feed: Generator[Any, None, None] | None = None
        self._read: Any = None  # the input tensors of a captured step, for datasets that are not resident
        self._step: Callable[[], None] | None = None
        self._evaluation: Callable[[], None] | None = None
        self._evaluated: tuple[Tensor, Metrics]  # the last results; a captured evaluation writes to the same tensors

    def advance(self, most: int) -> None:
        """Take at least one step, and at most `most` steps."""
        count = 1
        if not self.stack.dataset.resident:
            self._advance_fed()
        elif self._may_capture() and most >= self.chunk:
            count = self.chunk
            self._replay(lambda: self._several(count), warm_up=lambda: self._several(1))
        else:
            if self.stack.takes_turns:  # only a few steps, so that an interrupt does not wait for long
                count = max(1, min(most, int(TURN_SECONDS / self._seconds)))
            start = time.perf_counter()
            self._set(self._several(count))
            self._seconds = (time.perf_counter() - start) / count
        self.done += count

    def _may_capture(self) -> bool:
        return self._captures and bool(self.carry.sums)  # the first step is eager, to find out the names of metrics

    def _several(self, count: int, read: Sequence[Any] = ()) -> Carry:
        return advance(self.stack, self.carry, self.stack.batches(self.carry.state["step"][0], count, read))

    def _advance_fed(self) -> None:
        if self._feed is None:
            self._feed = self.stack.minibatches.read(self.done)
        read = next(self._feed)
        if not self._may_capture():
            self._set(self._several(1, [read]))
            return
        if self._read is None:
            self._read = pytree.tree_map(torch.clone, read)
        static = self._read
        _copy(read, static)

        def take() -> Carry:
            return self._several(1, [static])

        self._replay(take, warm_up=take)

    def _set(self, carry: Carry) -> None:
        """Replace the carry. If there is a graph, copy into the tensors of the graph.

        `self.carry` is complete at all times, because an interrupt may save it.
        """
        static, self.carry = self.carry, carry
        if self._step is not None:
            _copy(carry.tree(), static.tree())
            self.carry = static

    def _replay(self, step: Callable[[], Carry], warm_up: Callable[[], Carry]) -> None:
        """Run the captured step. Capture it first if there is none."""
        if self._step is None and self._captures:
            carry = self.carry = Carry(**pytree.tree_map(torch.clone, self.carry.tree()))
            self._step = self._capture(lambda: _copy(step().tree(), carry.tree()), warm_up)
        if self._step is None:
            self._set(step())
        else:
            self._step()

    def evaluate(self) -> tuple[Tensor, Metrics]:
        """The numbers of correct predictions [K, G] and the metrics of the current state: see `Stack.evaluate`."""
        if self._evaluation is None and self._captures and self._step is not None and self.stack.dataset.resident:
            self._evaluation = self._capture(self._evaluate_eagerly, self._evaluate_eagerly)
        if self._evaluation is None:
            self._evaluate_eagerly()
        else:
            self._evaluation()
        return self._evaluated

    def _evaluate_eagerly(self) -> None:
        self._evaluated = self.stack.evaluate(self.carry.state)

    def replace_state(self, **entries: Any) -> None:
        """Replace some entries of the state."""
        self._set(replace(self.carry, state={**self.carry.state, **entries}))

    def _capture(self, function: Callable[[], object], warm_up: Callable[[], object]) -> Callable[[], None] | None:
        """Capture a function of static tensors as a graph. Return None if this fails."""
        stream = torch.cuda.Stream(self.stack.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.stack.device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    warm_up()
            torch.cuda.current_stream(self.stack.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                f"{self.stack.specs[0].algorithm} cannot be captured as a CUDA graph ({first_line(error)}), "
                "so it runs eagerly.",
                stacklevel=2,
            )
            self._captures = False
            return None
        return graph.replay

    def close(self) -> None:
        """Stop reading batches ahead."""
        if self._feed is not None:
            self._feed.close()


def _copy(source: Any, target: Any) -> None:
    """Copy a tree of tensors to another tree. A source may also be a target, if a state keeps old parameters."""
    targets = pytree.tree_leaves(target)
    places = [old.untyped_storage().data_ptr() for old in targets]
    for new, old in zip(_apart(pytree.tree_leaves(source), places), targets, strict=True):
        old.copy_(new)


def _apart(sources: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """The sources, with copies of the tensors whose memory is overwritten before they are read."""
    own = [new.untyped_storage().data_ptr() for new in sources]
    return [new.clone() if at in places[:i] else new for i, (new, at) in enumerate(zip(sources, own, strict=True))]
