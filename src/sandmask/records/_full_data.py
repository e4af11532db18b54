"""Runs that were trained on all data are selected by their first stage: the same run with examples held back."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.records._types import RunRecord, RunSpec

FULL_DATA = "full_data"


def judged_by_first_stage(runs: Iterable[RunRecord]) -> Iterator[RunRecord]:
    """Yield the runs; those with `full_data` get the validation accuracies of the run without it.

    A run that trained on the examples held back for selection has no validation accuracy of its own. Evaluations that
    its first stage lacks are left out. Its accuracies on held-out environments do not change.

    :param runs: records of the runs.
    """
    runs = list(runs)
    firsts = {run.spec.id: run for run in runs if not _is_full(run.spec)}
    for run in runs:
        yield _judged(run, firsts) if _is_full(run.spec) else run


def _is_full(spec: RunSpec) -> bool:
    return spec.hparams.get(FULL_DATA, 0) > 0


def _judged(run: RunRecord, firsts: dict[str, RunRecord]) -> RunRecord:
    spec = run.spec
    hparams = {name: value for name, value in spec.hparams.items() if name != FULL_DATA}
    first = firsts.get(replace(spec, hparams=hparams).id)
    if first is None:
        raise SandmaskError(
            f"Run {spec.id} ({spec.algorithm} on {spec.dataset}) was trained with full_data=1, and is selected by the "
            "same run without it, which is not among these records. Train that one, and name its folder as well."
        )
    common, own, its = np.intersect1d(run.steps, first.steps, return_indices=True)
    outside = run.accuracy_out[own].copy()
    trained_on = list(run.train_envs)
    outside[:, trained_on] = first.accuracy_out[its][:, trained_on]
    metrics = {name: values[own] for name, values in run.metrics.items()}
    if "validation_loss" in first.metrics:
        metrics["validation_loss"] = first.metrics["validation_loss"][its]
    return replace(run, steps=common, accuracy_in=run.accuracy_in[own], accuracy_out=outside, metrics=metrics)
