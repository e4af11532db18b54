"""The evaluations of many runs, one after the other in a few long arrays."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandmask.records._types import RunRecord, RunSpec, Status

_SLAB = 1 << 22  # numbers; 32 MB are mapped by themselves, and go back to the system when they are freed


class _Long:
    """Numbers that are appended, and joined once."""

    def __init__(self) -> None:
        self._slabs: list[NDArray[np.float64]] = []
        self._free = 0  # at the end of the last slab
        self.length = 0

    def extend(self, values: NDArray[np.float64]) -> None:
        while len(values):
            if not self._free:
                self._free = min(max(self.length, len(values)), _SLAB)
                self._slabs.append(np.empty(self._free))
            part = values[: self._free]
            begin = len(self._slabs[-1]) - self._free
            self._slabs[-1][begin : begin + len(part)] = part
            self._free -= len(part)
            self.length += len(part)
            values = values[len(part) :]

    def pad(self, length: int) -> None:
        """Append NaN up to this length."""
        self.extend(np.full(length - self.length, np.nan))

    def join(self) -> NDArray[np.float64]:
        """All numbers as one array. What was gathered is gone then."""
        whole, begin = np.empty(self.length), 0
        for _ in range(len(self._slabs)):
            part = self._slabs.pop(0)[: self.length - begin]
            whole[begin : begin + len(part)] = part
            begin += len(part)
        return whole


class Curves:
    """The columns of a frame: accuracies of every row, metrics of every checkpoint, and constants of every run."""

    def __init__(self, runs: Iterable[RunRecord] = ()) -> None:
        self.specs: dict[str, RunSpec] = {}  # by id
        self.statuses: list[Status] = []
        self.env_names: list[tuple[str, ...]] = []
        self.steps: list[NDArray[np.int64]] = []
        self._accuracies = (_Long(), _Long())
        self._metrics: dict[str, _Long] = {}
        self._checkpoints = 0
        self._shared: dict[Any, Any] = {}
        for run in runs:
            self.add(run)

    def add(self, run: RunRecord) -> None:
        """Append a run."""
        self.specs[run.spec.id] = run.spec
        self.statuses.append(run.status)
        self.env_names.append(self._shared.setdefault(run.env_names, run.env_names))
        self.steps.append(self._shared.setdefault(run.steps.tobytes(), run.steps))
        for long, accuracy in zip(self._accuracies, (run.accuracy_in, run.accuracy_out), strict=True):
            long.extend(accuracy.ravel())
        for name, values in run.metrics.items():
            metric = self._metrics.setdefault(name, _Long())
            metric.pad(self._checkpoints)
            metric.extend(values)
        self._checkpoints += len(run.steps)

    def accuracies(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The "in" and "out" accuracies, row by row; to be asked for once."""
        inside, outside = self._accuracies
        return inside.join(), outside.join()

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that any run has."""
        return list(self._metrics)

    def metric(self, name: str) -> NDArray[np.float64]:
        """A metric, checkpoint by checkpoint; NaN for the runs that did not record it; to be asked for once."""
        self._metrics[name].pad(self._checkpoints)
        return self._metrics[name].join()
