"""Runs on all data that repeat what the same runs decided with examples held back: ERM++'s second stage."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.records import RunRecord, RunSpec, read_runs
from sandmask.records._averages import first_stage
from sandmask.selection import is_settled


class FirstStage:
    """The finished runs of a folder, whose drops of the learning rate other runs repeat."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.runs = {run.spec.id: run for run in read_runs(Path(folder)) if is_settled(run)}

    def repeated(self, spec: RunSpec) -> RunSpec:
        """The spec with the steps after which the learning rate dropped in its first stage.

        :param spec: spec of a run with `full_data` and `lr_patience`.
        """
        first = self.runs.get(first_stage(spec).id)
        if first is None:
            raise SandmaskError(
                f"{self.folder} lacks a finished run of {spec.algorithm} on {spec.dataset} with held-out environments "
                f"{list(spec.test_envs)}, draw {spec.hparams_seed}, trial {spec.trial_seed} and the same settings, but "
                "without full_data. Train it first."
            )
        if "lr_drops" not in first.metrics:
            raise SandmaskError(f"The runs of {self.folder} do not search the learning rate. Leave out --first-stage.")
        return replace(spec, hparams={**spec.hparams, **dict(zip(LR_DROP_STEPS, _drops(first), strict=False))})


def _drops(run: RunRecord) -> list[int]:
    """The evaluated steps after which the learning rate was lower."""
    found: list[int] = run.steps[1:][np.diff(run.metrics["lr_drops"]) > 0].tolist()
    return found
