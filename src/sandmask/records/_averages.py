"""Accuracies of averaged weights: stored as metrics of the run that they were averaged over, read as runs of their own.

A run that was trained with `options["averages"] = "sma,ema"` has one record in its file. `split_averages` turns it into
three: the run itself, and one record each whose spec has `options["average"]`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.records._types import RunRecord

AVERAGES = ("sma", "ema", "swad")
_PREFIX = "average/"


def averages_of(options: dict[str, object]) -> tuple[str, ...]:
    """Return the averages that a run with these options keeps.

    :param options: options of the run's spec.
    """
    text = str(options.get("averages", ""))
    return tuple(text.split(",")) if text else ()


def average_metrics(average: str, n_envs: int) -> list[str]:
    """Return the names of an average's metrics: accuracies "in", accuracies "out", the validation loss.

    :param average: "sma", "ema" or "swad".
    :param n_envs: number of environments.
    """
    splits = [f"{split}/{env}" for split in ("in", "out") for env in range(n_envs)]
    return [f"{_PREFIX}{average}/{name}" for name in (*splits, "validation_loss")]


def split_averages(runs: Iterable[RunRecord]) -> Iterator[RunRecord]:
    """Yield every run, followed by one record for each average that it kept.

    The averages leave no trace in the run itself: trained with and without them, it is the same run.

    :param runs: records of the runs.
    """
    seen: set[str] = set()
    for run in _each(runs):
        if run.spec.id not in seen:
            seen.add(run.spec.id)
            yield run


def _each(runs: Iterable[RunRecord]) -> Iterator[RunRecord]:
    for run in runs:
        averages = averages_of(run.spec.options)
        if not averages:
            yield run
            continue
        options = {name: value for name, value in run.spec.options.items() if name != "averages"}
        metrics = {name: values for name, values in run.metrics.items() if not name.startswith(_PREFIX)}
        yield replace(run, spec=replace(run.spec, options=options), metrics=metrics)
        for average in averages:
            yield _averaged(run, average, options)


def _averaged(run: RunRecord, average: str, options: dict[str, object]) -> RunRecord:
    n_envs = len(run.env_names)
    names = average_metrics(average, n_envs)
    missing = np.full(len(run.steps), np.nan)
    values = np.stack([run.metrics.get(name, missing) for name in names], axis=1)
    known = np.isfinite(values[:, : 2 * n_envs]).all(axis=1)  # SWAD has accuracies at the last evaluation only
    values = values[known]
    accuracies = values[:, : 2 * n_envs]
    if ((accuracies < 0) | (accuracies > 1)).any():
        raise SandmaskError(
            f"Run {run.spec.id}: the accuracies of its average {average!r} should be numbers from 0 to 1, and some are "
            "not. Restore its records from a copy, or train it again."
        )
    return replace(
        run,
        spec=replace(run.spec, options={**options, "average": average}),
        steps=run.steps[known],
        accuracy_in=np.ascontiguousarray(accuracies[:, :n_envs]),
        accuracy_out=np.ascontiguousarray(accuracies[:, n_envs:]),
        metrics={"validation_loss": values[:, -1]},
    )
