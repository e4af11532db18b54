"""Records as one tidy pandas frame, gathered in a few long arrays."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sandmask.records._averages import split_averages
from sandmask.records._measures import MEASURES, SPLITS, measured
from sandmask.records._reader import iterate_runs, read_runs
from sandmask.records._types import RunRecord, RunSpec, Status

if TYPE_CHECKING:
    import pandas as pd


_MEASURE = re.compile(rf"({'|'.join(MEASURES)})/({'|'.join(SPLITS)})/\d+")


class _Long:
    """Numbers that are appended, and joined once."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.float64]] = []
        self.length = 0

    def extend(self, values: NDArray[np.float64]) -> None:
        self._parts.append(values)
        self.length += len(values)

    def pad(self, length: int) -> None:
        """Append NaN up to this length."""
        self.extend(np.full(length - self.length, np.nan))

    def join(self) -> NDArray[np.float64]:
        """All numbers as one array. What was gathered is gone then."""
        parts, self._parts = self._parts, []
        return np.concatenate([np.empty(0), *parts])


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


_Column = Any  # a numpy array or a pandas one
_CHUNK = 1 << 20  # rows
_INT32 = np.iinfo(np.int32)


def load_records(path: str | os.PathLike[str], *, hparams: bool = True) -> "pd.DataFrame":
    """Read everything below a folder as a pandas frame: one row for each (run, step, environment).

    Columns: run, dataset, algorithm, test_envs (as text: "0" or "0,2"), trial_seed, hparams_seed, seed, space, options
    (as text: "average=sma"), step, env, env_name, is_test, in_accuracy, out_accuracy, metrics of environments where
    they were recorded (in_f1, out_f1, ...), status, the other metrics, and the hyperparameters as `hparams.NAME`.
    Averages of a run's weights have rows of their own, with an option such as "average=sma".

    To keep large sweeps small, words are categories, integers have 32 bits where those suffice, and hyperparameters
    that most rows lack are sparse columns; `frame.sparse.to_dense()` converts them.

    :param path: folder of records, record file or archive.
    :param hparams: include the hyperparameters, which repeat on every row.
    """
    curves = Curves()
    seen: set[str] = set()
    for run in iterate_runs(path):
        if run.spec.id in seen:  # the same run in two files: which one counts is known when all are read
            return frame(read_runs(path), hparams=hparams)
        seen.add(run.spec.id)
        for record in split_averages([run]):
            if record.spec.id not in curves.specs:
                curves.add(record)
    return _frame(curves, hparams)


def frame(runs: Sequence[RunRecord], *, hparams: bool = True) -> "pd.DataFrame":
    """Return the frame of `load_records` for runs that have been read.

    :param runs: records of the runs.
    :param hparams: include the hyperparameters.
    """
    return _frame(Curves(split_averages(runs)), hparams)


def _frame(curves: Curves, hparams: bool) -> "pd.DataFrame":
    import pandas as pd

    columns = dict(_columns(curves, hparams))
    return pd.DataFrame(columns, copy=False)  # a copy would need all of the memory twice


def _columns(curves: Curves, hparams: bool) -> Iterator[tuple[str, _Column]]:
    specs = list(curves.specs.values())
    checkpoints = np.array([len(steps) for steps in curves.steps], dtype=np.int64)
    environments = np.array([len(names) for names in curves.env_names], dtype=np.int64)
    rows = checkpoints * environments
    yield "run", _words([spec.id for spec in specs], rows)
    yield "dataset", _words([spec.dataset for spec in specs], rows)
    yield "algorithm", _words([spec.algorithm for spec in specs], rows)
    yield "test_envs", _words([",".join(map(str, spec.test_envs)) for spec in specs], rows)
    for name in ("trial_seed", "hparams_seed", "seed"):
        yield name, np.repeat(_integers([getattr(spec, name) for spec in specs]), rows)
    yield "space", _words([spec.space for spec in specs], rows)
    yield "options", _words([_options(spec) for spec in specs], rows)
    widths = np.repeat(environments, checkpoints)  # environments of each checkpoint
    yield "step", np.repeat(_integers(_join(curves.steps, np.int64)), widths)
    yield "env", _tiled([np.arange(count) for count in environments], curves, np.int32)
    yield "env_name", _environment_names(curves)
    held_out = [
        np.isin(np.arange(len(names)), spec.test_envs) for names, spec in zip(curves.env_names, specs, strict=True)
    ]
    yield "is_test", _tiled(held_out, curves, np.bool_)
    yield from zip(("in_accuracy", "out_accuracy"), curves.accuracies(), strict=True)
    yield from curves.measures()
    yield "status", _words(curves.statuses, rows)
    for name in curves.metrics:
        yield name, np.repeat(curves.metric(name), widths)
    for name in dict.fromkeys(name for spec in specs for name in spec.hparams) if hparams else ():
        yield f"hparams.{name}", _hyperparameter([spec.hparams.get(name) for spec in specs], rows)


def _options(spec: RunSpec) -> str:
    return ", ".join(f"{name}={_word(value)}" for name, value in sorted(spec.options.items()))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _integers(values: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
    found = np.array(values, dtype=np.int64)
    small = not len(found) or (found.min() >= _INT32.min and found.max() <= _INT32.max)
    return found.astype(np.int32) if small else found


def _join(parts: Iterable[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _tiled(values: Sequence[NDArray[Any]], curves: Curves, dtype: Any) -> NDArray[Any]:
    """A value for each environment of each run, repeated at every checkpoint."""
    return _join(
        (np.tile(one.astype(dtype), len(steps)) for one, steps in zip(values, curves.steps, strict=True)), dtype
    )


def _hyperparameter(values: Sequence[Any], rows: NDArray[np.int64]) -> _Column:
    """A column of numbers, or of words where some value is not a number; None is where a run has no such value."""
    present = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) for value in present):
        return _words([None if value is None else _word(value) for value in values], rows)
    if len(present) == len(values) and all(type(value) is int and abs(value) <= _INT32.max for value in values):
        return np.repeat(_integers(values), rows)
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    has_value = ~np.isnan(numbers)
    if 2 * int(rows[has_value].sum()) >= int(rows.sum()):
        return np.repeat(numbers, rows)
    return _sparse(numbers, rows)


def _sparse(numbers: NDArray[np.float64], rows: NDArray[np.int64]) -> _Column:
    """A sparse column; chunk by chunk, because pandas needs several times a chunk's memory on the way."""
    import pandas as pd

    some_runs = np.array_split(np.arange(len(numbers)), 1 + int(rows.sum()) // _CHUNK)
    parts = (pd.arrays.SparseArray(np.repeat(numbers[some], rows[some]), kind="block") for some in some_runs)
    return pd.concat([pd.Series(part) for part in parts], ignore_index=True).array


def _words(values: Sequence[str | None], rows: NDArray[np.int64]) -> _Column:
    position = _positions(value for value in values if value is not None)
    codes = np.array([-1 if value is None else position[value] for value in values], dtype=_code_type(position))
    return _categories(np.repeat(codes, rows), position)


def _environment_names(curves: Curves) -> _Column:
    position = _positions(name for names in dict.fromkeys(curves.env_names) for name in names)
    codes = [np.array([position[name] for name in names]) for names in curves.env_names]
    return _categories(_tiled(codes, curves, _code_type(position)), position)


def _code_type(position: dict[str, int]) -> Any:
    return np.min_scalar_type(-max(1, len(position)))


def _categories(codes: NDArray[Any], position: dict[str, int]) -> _Column:
    import pandas as pd

    return pd.Categorical.from_codes(codes, categories=pd.Index(list(position), dtype=str), validate=False)


def _positions(names: Iterable[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}
