"""The evaluations of many runs, one after the other in a few long arrays."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandmask.records._measures import MEASURES, SPLITS, measured
from sandmask.records._types import RunRecord, RunSpec, Status

_MEASURE = re.compile(rf"({'|'.join(MEASURES)})/({'|'.join(SPLITS)})/\d+")
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


def _by_environment(run: RunRecord) -> dict[str, NDArray[np.float64]]:
    """Metrics beyond accuracy, [T, environments] each, by the names of their columns."""
    names = [name for name in MEASURES if not MEASURES[name].is_table]
    found = {f"{split}_{name.replace('-', '_')}": measured(run, name, split) for name in names for split in SPLITS}
    return {name: table for name, table in found.items() if table is not None}


class Curves:
    """The columns of a frame: accuracies of every row, metrics of every checkpoint, and constants of every run."""

    def __init__(self, runs: Iterable[RunRecord] = ()) -> None:
        self.specs: dict[str, RunSpec] = {}  # by id
        self.statuses: list[Status] = []
        self.env_names: list[tuple[str, ...]] = []
        self.steps: list[NDArray[np.int64]] = []
        self._accuracies = (_Long(), _Long())
        self._metrics: dict[str, _Long] = {}
        self._measures: dict[str, _Long] = {}  # of every row, as accuracies
        self._rows = 0
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
        by_environment = _by_environment(run)
        for name, table in by_environment.items():
            long = self._measures.setdefault(name, _Long())
            long.pad(self._rows)
            long.extend(table.ravel())
        self._rows += run.accuracy_in.size
        for name, values in run.metrics.items():
            if _MEASURE.fullmatch(name) and by_environment:
                continue
            metric = self._metrics.setdefault(name, _Long())
            metric.pad(self._checkpoints)
            metric.extend(values)
        self._checkpoints += len(run.steps)

    def accuracies(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The "in" and "out" accuracies, row by row; to be asked for once."""
        inside, outside = self._accuracies
        return inside.join(), outside.join()

    def measures(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Metrics of environments, such as "in_f1", row by row; NaN for the runs that did not record them."""
        for name, long in self._measures.items():
            long.pad(self._rows)
            yield name, long.join()

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that any run has."""
        return list(self._metrics)

    def metric(self, name: str) -> NDArray[np.float64]:
        """A metric, checkpoint by checkpoint; NaN for the runs that did not record it; to be asked for once."""
        self._metrics[name].pad(self._checkpoints)
        return self._metrics[name].join()
