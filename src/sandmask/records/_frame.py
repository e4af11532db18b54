"""Records as one tidy pandas frame."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sandmask.records._store import read_runs
from sandmask.records._types import RunRecord

if TYPE_CHECKING:
    import pandas as pd

_SPEC_COLUMNS = ("dataset", "algorithm", "trial_seed", "hparams_seed", "seed", "space")


def load_records(path: str | os.PathLike[str], *, hparams: bool = True) -> "pd.DataFrame":
    """Everything below a folder as a frame: one row for each (run, step, environment).

    Columns: run, dataset, algorithm, test_envs (as text: "0" or "0,2"), trial_seed, hparams_seed, seed,
    space, step, env, env_name, is_test, in_accuracy, out_accuracy, status, the metrics, and the
    hyperparameters as `hparams.NAME` (left out on request: they repeat on every row). Words are categories,
    to keep large sweeps small.
    """
    return frame(read_runs(path), hparams=hparams)


def frame(runs: Sequence[RunRecord], *, hparams: bool = True) -> "pd.DataFrame":
    """The same for runs already read."""
    import pandas as pd

    rows = np.array([run.accuracy_in.size for run in runs], dtype=np.int64)
    environments = np.array([len(run.env_names) for run in runs], dtype=np.int64)
    per_run = {
        "run": [run.spec.id for run in runs],
        **{name: [getattr(run.spec, name) for run in runs] for name in _SPEC_COLUMNS[:2]},
        "test_envs": [",".join(map(str, run.spec.test_envs)) for run in runs],
        **{name: [getattr(run.spec, name) for run in runs] for name in _SPEC_COLUMNS[2:]},
    }
    columns: dict[str, Any] = {name: _repeat(values, rows) for name, values in per_run.items()}
    checkpoints = _join([run.steps for run in runs], np.int64)
    widths = np.repeat(environments, [len(run.steps) for run in runs])  # environments of each checkpoint
    columns["step"] = np.repeat(checkpoints, widths)
    columns["env"] = _join([np.tile(np.arange(len(run.env_names)), len(run.steps)) for run in runs], np.int64)
    columns["env_name"] = _environment_names(runs)
    columns["is_test"] = _join([np.tile(_is_test(run), len(run.steps)) for run in runs], np.bool_)
    columns["in_accuracy"] = _join([run.accuracy_in.ravel() for run in runs], np.float64)
    columns["out_accuracy"] = _join([run.accuracy_out.ravel() for run in runs], np.float64)
    columns["status"] = _repeat([run.status for run in runs], rows)
    for name in _names([run.metrics for run in runs]):
        absent = [run.metrics.get(name, np.full(len(run.steps), np.nan)) for run in runs]
        columns[name] = np.repeat(_join(absent, np.float64), widths)
    for name in _names([run.spec.hparams for run in runs]) if hparams else ():
        columns[f"hparams.{name}"] = _repeat([run.spec.hparams.get(name, np.nan) for run in runs], rows)
    return pd.DataFrame(columns)


def _names(dictionaries: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for dictionary in dictionaries for name in dictionary))


def _is_test(run: RunRecord) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.isin(np.arange(len(run.env_names)), run.spec.test_envs)


def _join(parts: Sequence[np.ndarray[Any, Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _repeat(values: Sequence[Any], rows: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    import pandas as pd

    if not any(isinstance(value, str) for value in values):
        return np.repeat(np.array(values), rows)
    position = _positions(values)
    codes = np.repeat(np.array([position[value] for value in values], dtype=np.int32), rows)
    return pd.Categorical.from_codes(codes, categories=pd.Index(list(position)))


def _environment_names(runs: Sequence[RunRecord]) -> Any:
    import pandas as pd

    position = _positions([name for run in runs for name in run.env_names])
    parts = [np.tile([position[name] for name in run.env_names], len(run.steps)) for run in runs]
    return pd.Categorical.from_codes(_join(parts, np.int32), categories=pd.Index(list(position), dtype=str))


def _positions(names: Sequence[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}
