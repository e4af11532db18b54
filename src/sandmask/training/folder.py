"""A run's folder: its records, its checkpoint while it trains, and the model it ends with.

records.jsonl            spec and evaluations
checkpoint.safetensors   everything needed to go on; removed when the run is done
model.safetensors        the weights by name, with what is needed to use them
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from sandmask.algorithms import State
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunRecord, RunSpec, read_runs
from sandmask.training.checkpoint import load_metadata
from sandmask.training.loop import CHECKPOINT_SECONDS, Report, Trainer
from sandmask.training.model_file import save_model
from sandmask.training.stack import Stack

RECORDS, CHECKPOINT, MODEL = "records.jsonl", "checkpoint.safetensors", "model.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """Where one run lives."""

    path: Path

    def train(
        self,
        spec: RunSpec,
        dataset: Dataset,
        device: torch.device,
        *,
        weights: str | None = None,
        compiled: bool = False,
        report: Report = lambda _: None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> RunRecord:
        """Train to the end, from the beginning or from where an earlier call was stopped."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_same_run(spec)
        with RecordWriter(self.path / RECORDS) as writer:
            if not self.finished(spec):
                stack = Stack([spec], dataset, device, weights=weights, compiled=compiled)
                trainer = Trainer(stack, writer, self.path / CHECKPOINT, report, checkpoint_seconds)
                state: State = pytree.tree_map(lambda t: t[0], trainer.run())
                status = writer.status(spec.id)
                assert status is not None
                save_model(self.path / MODEL, stack.algorithm, state, spec, status, stack.dataset)
        (self.path / CHECKPOINT).unlink(missing_ok=True)
        return self.record()

    def finished(self, spec: RunSpec) -> bool:
        """Whether the folder holds this run, trained to its end, with its model."""
        return (self.path / MODEL).exists() and load_metadata(self.path / MODEL)["spec"] == spec.to_json()

    def record(self) -> RunRecord:
        """The run's record."""
        runs = read_runs(self.path / RECORDS)
        if len(runs) != 1:
            raise SandmaskError(f"{self.path / RECORDS} should hold one run. Found {len(runs)}.")
        return runs[0]

    def _check_same_run(self, spec: RunSpec) -> None:
        """A folder is one run's: another one's records there would be mixed up with it."""
        if (self.path / RECORDS).exists():
            other = [run.spec for run in read_runs(self.path / RECORDS) if run.spec != spec]
            if other:
                raise SandmaskError(
                    f"{self.path} holds another run ({other[0].algorithm} on {other[0].dataset}, run {other[0].id}). "
                    "Choose another folder with --out, or delete that one."
                )
