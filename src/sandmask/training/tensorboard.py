"""A run's evaluations for TensorBoard: losses, accuracies, and what else was recorded."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from sandmask.diagnostics import open_tensorboard
from sandmask.records import RunRecord, RunSpec


class RunLog:
    """Writes one run's evaluations: metrics by their names, and accuracies as

    - `accuracy/in/<environment>` and `accuracy/out/<environment>`, held-out ones included,
    - `accuracy/out/training environments`: the mean over those that the run trains on.

    What the folder holds of an earlier attempt is not shown any more: a run that goes on writes all of it again.
    """

    def __init__(self, folder: str | os.PathLike[str], spec: RunSpec, environments: Sequence[str]) -> None:
        self.environments = list(environments)
        self.trained = [e for e in range(len(self.environments)) if e not in spec.test_envs]
        self._writer = open_tensorboard(folder, purge_step=0)

    def evaluation(
        self, step: int, inside: Sequence[float], outside: Sequence[float], metrics: Mapping[str, float]
    ) -> None:
        """Write one evaluation."""
        values = dict(metrics)
        for split, accuracies in (("in", inside), ("out", outside)):
            values |= {
                f"accuracy/{split}/{name}": accuracy
                for name, accuracy in zip(self.environments, accuracies, strict=True)
            }
        values["accuracy/out/training environments"] = float(np.mean([outside[e] for e in self.trained]))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what the writer holds back."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def log_record(record: RunRecord, folder: Path) -> None:
    """Write a whole run for TensorBoard, for runs that trained in a stack.

    :param record: record of the run.
    :param folder: folder for event files.
    """
    with RunLog(folder, record.spec, record.env_names) as log:
        for row, step in enumerate(record.steps):
            metrics = {name: float(curve[row]) for name, curve in record.metrics.items()}
            log.evaluation(int(step), record.accuracy_in[row].tolist(), record.accuracy_out[row].tolist(), metrics)
