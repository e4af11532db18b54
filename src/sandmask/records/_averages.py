"""Accuracies of averaged weights. They are stored as metrics of the run, and read as separate runs.

A run that was trained with `options["averages"] = "sma,ema"` has one record in its file. `split_averages` turns it into
three: the run itself, and one record each whose spec has `options["average"]`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.records._measures import SPLITS
from sandmask.records._types import RunRecord, RunSpec, extent, joined, under_prefix

AVERAGES = ("sma", "ema", "swad")
_PREFIX = "average/"


def averages_of(options: dict[str, object]) -> tuple[str, ...]:
    """Return the averages that a run with these options keeps.

    :param options: options of the run's spec.
    """
    text = str(options.get("averages", ""))
    return tuple(text.split(",")) if text else ()


def average_metrics(average: str, n_envs: int) -> list[str]:
    """Return the names of an average's metrics: accuracies "in", accuracies "out", and the validation loss.

    :param average: "sma", "ema" or "swad".
    :param n_envs: number of environments.
    """
    splits = [f"{split}/{env}" for split in SPLITS for env in range(n_envs)]
    return [f"{_PREFIX}{average}/{name}" for name in (*splits, "validation_loss")]


def split_averages(runs: Iterable[RunRecord]) -> Iterator[RunRecord]:
    """Yield every run, followed by one record for each average that it kept.

    Keeping averages does not change the run itself. If it was trained with and without them, it is yielded once: the
    longer record, with the metrics of both if they are equally long.

    :param runs: records of the runs.
    """
    found: dict[str, RunRecord] = {}
    for run in runs:
        averages = averages_of(run.spec.options)
        records = [_without_averages(run), *(_averaged(run, average) for average in averages)] if averages else [run]
        for record in records:
            known = found.get(record.spec.id)
            found[record.spec.id] = record if known is None else joined(*sorted((record, known), key=extent))
    yield from found.values()


def trained(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the runs of `split_averages` without their averages.

    :param runs: records of runs and averages.
    """
    return [run for run in runs if "average" not in run.spec.options]


def _without_averages(run: RunRecord) -> RunRecord:
    return replace(
        run,
        spec=averaged_spec(run.spec),
        metrics={name: values for name, values in run.metrics.items() if not name.startswith(_PREFIX)},
        tables={name: counts for name, counts in run.tables.items() if not name.startswith(_PREFIX)},
    )


def averaged_spec(spec: RunSpec, average: str | None = None) -> RunSpec:
    """Return the spec under which reports show a run that kept averages, or one of its averages.

    :param spec: spec of the run.
    :param average: "sma", "ema" or "swad"; the run itself if not given.
    """
    options = {name: value for name, value in spec.options.items() if name != "averages"}
    return replace(spec, options=options if average is None else {**options, "average": average})


def _averaged(run: RunRecord, average: str) -> RunRecord:
    """Return the record of an average. SWAD has accuracies at the last evaluation only."""
    prefix = f"{_PREFIX}{average}/"
    missing = np.full(len(run.steps), np.nan)
    metrics = {"validation_loss": missing, **under_prefix(prefix, run.metrics)}
    inside, outside = (
        np.stack([metrics.pop(f"{split}/{env}", missing) for env in range(len(run.env_names))], axis=1)
        for split in SPLITS
    )
    both = np.hstack([inside, outside])
    known = np.isfinite(both).all(axis=1)
    if ((both[known] < 0) | (both[known] > 1)).any():
        raise SandmaskError(
            f"Run {run.spec.id}: the accuracies of its average {average!r} should be numbers from 0 to 1, and some are "
            "not. Restore its records from a copy, or train it again."
        )
    return replace(
        run,
        spec=averaged_spec(run.spec, average),
        accuracy_in=inside,
        accuracy_out=outside,
        metrics=metrics,
        tables=under_prefix(prefix, run.tables),
    ).at(known)


FULL_DATA = "full_data"


def judged_by_first_stage(runs: Iterable[RunRecord]) -> Iterator[RunRecord]:
    """Yield the runs. Those with `full_data` get the validation accuracies of their first stage, the run without it.

    A run with `full_data` also trains on the validation examples, so it has no validation accuracy of its own. It gets
    the validation metrics of its first stage too, keeps only the evaluations that both have, and is not done before its
    first stage is. Its accuracies on held-out environments do not change.

    :param runs: records of the runs.
    """
    runs = list(runs)
    firsts = {run.spec.id: run for run in runs if not _is_full(run.spec)}
    for run in runs:
        yield _judged(run, firsts) if _is_full(run.spec) else run


def first_stage(spec: RunSpec) -> RunSpec:
    """Return the spec of the first stage, which has validation examples and decides when the learning rate drops."""
    hparams = {name: value for name, value in spec.hparams.items() if name not in (FULL_DATA, *LR_DROP_STEPS)}
    return replace(spec, hparams=hparams)


def _is_full(spec: RunSpec) -> bool:
    return spec.hparams.get(FULL_DATA, 0) > 0


def _judged(run: RunRecord, firsts: dict[str, RunRecord]) -> RunRecord:
    spec = run.spec
    first = firsts.get(first_stage(spec).id)
    if first is None:
        raise SandmaskError(
            f"Run {spec.id} ({spec.algorithm} on {spec.dataset}) was trained with full_data=1, so it has no "
            "validation accuracies. Reports use those of the same run without full_data, which is not among these "
            "records. Train that run, and report a folder with both."
        )
    _, own_rows, first_rows = np.intersect1d(run.steps, first.steps, return_indices=True)
    own, its = run.at(own_rows), first.at(first_rows)
    outside, trained_on = own.accuracy_out.copy(), list(run.train_envs)
    outside[:, trained_on] = its.accuracy_out[:, trained_on]
    metrics = {name: values for name, values in own.metrics.items() if not _validates(name, run)}
    metrics |= {name: values for name, values in its.metrics.items() if _validates(name, run)}
    # What a first stage would select is not known before it is done.
    ended = run if first.status == "done" else first
    return replace(own, accuracy_out=outside, metrics=metrics, status=ended.status, diverged_at=ended.diverged_at)


def _validates(metric: str, run: RunRecord) -> bool:
    """Whether a metric is computed on validation examples of the training environments."""
    _, out, env = metric.rpartition("/out/")
    return metric == "validation_loss" or (bool(out) and env.isdecimal() and int(env) in run.train_envs)
