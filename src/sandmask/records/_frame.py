"""Records as a pandas data frame."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sandmask.records._averages import split_averages
from sandmask.records._measures import CURVE, MEASURES, SPLITS, measured
from sandmask.records._reader import read_runs
from sandmask.records._types import RunRecord, word_of

if TYPE_CHECKING:
    import pandas as pd

_Column = Any  # a numpy array or a pandas one
_CHUNK = 1 << 20  # rows
_INT32 = np.iinfo(np.int32)


def load_records(path: str | os.PathLike[str], *, hparams: bool = True) -> "pd.DataFrame":
    """Read records as a pandas data frame with one row for each (run, step, environment).

    Columns: run, dataset, algorithm, test_envs (as text: "0" or "0,2"), trial_seed, hparams_seed, seed, space, network,
    weights, precision, options (as text: "average=sma"), step, env, env_name, is_test, in_accuracy, out_accuracy,
    recorded metrics of environments (in_f1, out_f1, ...), status, the other metrics, and the hyperparameters as
    `hparams.NAME`. Averages of a run's weights have rows of their own, with an option such as "average=sma".

    To save memory, text columns are categorical, integers have 32 bits if these suffice, and hyperparameters that most
    rows lack are sparse columns. `frame[name].sparse.to_dense()` converts a sparse column.

    :param path: folder of records, record file or archive.
    :param hparams: include the hyperparameters, which are repeated in every row.
    """
    return frame(read_runs(path), hparams=hparams)


def frame(runs: Sequence[RunRecord], *, hparams: bool = True) -> "pd.DataFrame":
    """Return the data frame of `load_records` for runs in memory.

    :param runs: records of the runs.
    :param hparams: include the hyperparameters.
    """
    import pandas as pd

    columns = dict(_columns(list(split_averages(runs)), hparams))
    return pd.DataFrame(columns, copy=False)  # a copy would double the memory


def _columns(runs: Sequence[RunRecord], hparams: bool) -> Iterator[tuple[str, _Column]]:
    specs = [run.spec for run in runs]
    checkpoints = np.array([len(run.steps) for run in runs], dtype=np.int64)
    environments = np.array([len(run.env_names) for run in runs], dtype=np.int64)
    rows = checkpoints * environments
    widths = np.repeat(environments, checkpoints)  # environments of each checkpoint
    yield "run", _words([spec.id for spec in specs], rows)
    yield "dataset", _words([spec.dataset for spec in specs], rows)
    yield "algorithm", _words([spec.algorithm for spec in specs], rows)
    yield "test_envs", _words([",".join(map(str, spec.test_envs)) for spec in specs], rows)
    for name in ("trial_seed", "hparams_seed", "seed"):
        yield name, np.repeat(_integers([getattr(spec, name) for spec in specs]), rows)
    for name in ("space", "network", "weights", "precision"):
        yield name, _words([getattr(spec, name) for spec in specs], rows)
    options = (", ".join(f"{name}={word_of(spec.options[name])}" for name in sorted(spec.options)) for spec in specs)
    yield "options", _words(list(options), rows)
    yield "step", np.repeat(_integers(_join((run.steps for run in runs), np.int64)), widths)
    yield "env", _tiled([np.arange(count) for count in environments], checkpoints, np.int32)
    yield "env_name", _environment_names(runs, checkpoints)
    held_out = [np.isin(np.arange(len(run.env_names)), run.spec.test_envs) for run in runs]
    yield "is_test", _tiled(held_out, checkpoints, np.bool_)
    yield "in_accuracy", _join((run.accuracy_in.ravel() for run in runs), np.float64)
    yield "out_accuracy", _join((run.accuracy_out.ravel() for run in runs), np.float64)
    for measure, split in itertools.product(MEASURES, SPLITS):
        tables = [measured(run, measure, split) for run in runs]
        if any(table is not None for table in tables):
            yield f"{split}_{measure.replace('-', '_')}", _join_known(tables, rows)
    yield "status", _words([run.status for run in runs], rows)
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if not CURVE.fullmatch(name):
            curves = [run.metrics.get(name) for run in runs]
            yield name, np.repeat(_join_known(curves, checkpoints), widths)
    for name in dict.fromkeys(name for spec in specs for name in spec.hparams) if hparams else ():
        yield f"hparams.{name}", _hyperparameter([spec.hparams.get(name) for spec in specs], rows)


def _integers(values: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
    found = np.array(values, dtype=np.int64)
    small = not len(found) or (found.min() >= _INT32.min and found.max() <= _INT32.max)
    return found.astype(np.int32) if small else found


def _join(parts: Iterable[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _join_known(parts: Iterable[NDArray[np.float64] | None], lengths: Iterable[int]) -> NDArray[np.float64]:
    """Concatenate the parts, with NaN for the runs that did not record theirs."""
    known = (
        np.full(length, np.nan) if part is None else part.ravel() for part, length in zip(parts, lengths, strict=True)
    )
    return _join(known, np.float64)


def _tiled(values: Iterable[NDArray[Any]], checkpoints: Iterable[int], dtype: Any) -> NDArray[Any]:
    """Repeat the values of each run, one per environment, for every checkpoint."""
    return _join((np.tile(one.astype(dtype), count) for one, count in zip(values, checkpoints, strict=True)), dtype)


def _hyperparameter(values: Sequence[Any], rows: NDArray[np.int64]) -> _Column:
    """Return a column of numbers, or of text if some value is not a number. None marks runs without the value."""
    present = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) for value in present):
        return _words([None if value is None else word_of(value) for value in values], rows)
    if len(present) == len(values) and all(type(value) is int and abs(value) <= _INT32.max for value in values):
        return np.repeat(_integers(values), rows)
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    has_value = ~np.isnan(numbers)
    if 2 * int(rows[has_value].sum()) >= int(rows.sum()):
        return np.repeat(numbers, rows)
    return _sparse(numbers, rows)


def _sparse(numbers: NDArray[np.float64], rows: NDArray[np.int64]) -> _Column:
    """Return a sparse column. It is built in chunks, because pandas needs several times the memory of a chunk."""
    import pandas as pd

    some_runs = np.array_split(np.arange(len(numbers)), 1 + int(rows.sum()) // _CHUNK)
    parts = (pd.arrays.SparseArray(np.repeat(numbers[some], rows[some]), kind="block") for some in some_runs)
    return pd.concat([pd.Series(part) for part in parts], ignore_index=True).array


def _words(values: Sequence[str | None], rows: NDArray[np.int64]) -> _Column:
    import pandas as pd

    categories = _categories(value for value in values if value is not None)
    codes = pd.Categorical(np.array(values, dtype=object), dtype=categories).codes
    return pd.Categorical.from_codes(np.repeat(codes, rows), dtype=categories)


def _environment_names(runs: Sequence[RunRecord], checkpoints: Iterable[int]) -> _Column:
    import pandas as pd

    datasets = dict.fromkeys(run.env_names for run in runs)
    categories = _categories(name for names in datasets for name in names)
    codes = {names: pd.Categorical(names, dtype=categories).codes for names in datasets}
    return pd.Categorical.from_codes(
        _tiled((codes[run.env_names] for run in runs), checkpoints, np.int32), dtype=categories
    )


def _categories(words: Iterable[str]) -> "pd.CategoricalDtype":
    import pandas as pd

    return pd.CategoricalDtype(pd.Index(list(dict.fromkeys(words)), dtype=str))
