"""The folder of a run.

records.jsonl            spec and evaluations
checkpoint.safetensors   everything needed to resume; removed when the run is done, unless `keep_checkpoint` is set
model.safetensors        the final weights by name, with everything needed to predict
model-sma.safetensors    the same for averaged weights
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch.utils import _pytree as pytree

from sandmask._memory import is_out_of_memory
from sandmask._text import printable
from sandmask.algorithms import State
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.functional.ranks import ALONE, Ranks
from sandmask.loggers import Logger, RunLog
from sandmask.records import RecordWriter, RunRecord, RunSpec, Status, averages_of, read_runs
from sandmask.training.averaging import averaged_state
from sandmask.training.checkpoint import extend_checkpoint, load_checked
from sandmask.training.evaluation import OnBatch, evaluation_steps
from sandmask.training.loop import CHECKPOINT_SECONDS, OnProgress, Trainer
from sandmask.training.model_file import load_info, save_model
from sandmask.training.specs import flat_spec
from sandmask.training.stack import Stack, without_averages

RECORDS, CHECKPOINT, MODEL = "records.jsonl", "checkpoint.safetensors", "model.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    def train(
        self,
        spec: RunSpec,
        dataset: Dataset,
        device: torch.device,
        *,
        weights: str | None = None,
        compiled: bool = False,
        fast: bool = True,
        diagnostics: bool = False,
        metrics: Sequence[str] = (),
        train_eval_limit: int | None = None,
        loggers: Sequence[Logger] = (),
        on_progress: OnProgress = lambda _: None,
        evaluating: OnBatch | None = None,
        keep_checkpoint: bool = False,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        ranks: Ranks = ALONE,
    ) -> RunRecord:
        """Train the run to its end. If an earlier call was interrupted, continue from its checkpoint.

        A finished run is read and not changed. Arguments that are not listed here are those of `train_stack`.

        :param loggers: loggers that receive every evaluation.
        :param evaluating: called during an evaluation with the numbers of evaluated examples and of all examples.
        :param keep_checkpoint: keep the checkpoint at the end, so that a call with more steps continues from there.
        :param ranks: processes that train the run together. All processes call this method with the same arguments.
            The first process reads and writes the folder.
        :return: the record of the run.
        """
        with ranks.together():
            if ranks.first:
                self._prepare(spec, dataset)
            finished = ranks.first and self._is_complete(spec)
        if not ranks.of_first(finished):
            with _out_of_memory_explained(device), ExitStack() as files:
                with ranks.together():
                    # All user errors are raised before the first file is written.
                    stack = Stack(
                        [spec],
                        dataset,
                        device,
                        weights=weights,
                        compiled=compiled,
                        diagnostics=diagnostics,
                        metrics=metrics,
                        train_eval_limit=train_eval_limit,
                        ranks=ranks,
                    )
                    recorder = self._open(files, stack, loggers) if ranks.first else None
                trainer = Trainer(
                    stack,
                    self.path / CHECKPOINT,
                    on_progress,
                    checkpoint_seconds=checkpoint_seconds,
                    fast=fast,
                    on_evaluation=None if recorder is None else recorder.add,
                    evaluating=evaluating,
                )
                if recorder is None:
                    trainer.run()
                else:
                    recorder.catch_up(trainer)
                    self._complete(trainer, recorder, keep_checkpoint=keep_checkpoint)
        record: RunRecord = ranks.of_first(self.record() if ranks.first else None)
        return record

    def _is_complete(self, spec: RunSpec) -> bool:
        """Whether the folder holds the finished run. A damaged model is an error."""
        if not self.finished(spec):
            return False
        averages = filter(Path.exists, map(self.average_path, averages_of(spec.options)))
        for model in (self.path / MODEL, *averages):
            load_checked(model)
        return True

    def _open(self, files: ExitStack, stack: Stack, loggers: Sequence[Logger]) -> "_Recorder":
        """Open the files that a run writes while it trains, and its loggers."""
        log = files.enter_context(RunLog(loggers, stack.specs[0], stack.dataset.environments)) if loggers else None
        return _Recorder(files.enter_context(RecordWriter(self.path / RECORDS)), stack, log)

    def _complete(self, trainer: Trainer, recorder: "_Recorder", *, keep_checkpoint: bool) -> None:
        """Train to the end and write the model."""
        stack = trainer.stack
        state, averages = without_averages(trainer.run())
        try:
            if keep_checkpoint:
                trainer.save()
            status = recorder.end(trainer)
            states = [(name, averaged_state(state, average)) for name, average in averages.items()]
            # The file that marks the run as finished is written last.
            for name, stacked in [*states, (None, state)]:
                one: State = pytree.tree_map(lambda t: t[0], stacked)
                path = self.path / MODEL if name is None else self.average_path(name)
                save_model(path, stack.algorithm, one, stack.specs[0], status, stack.dataset, name)
        except KeyboardInterrupt:
            trainer.save()
            raise
        if not keep_checkpoint:
            (self.path / CHECKPOINT).unlink(missing_ok=True)
        if recorder.log is not None:
            recorder.log.finish(status, [self.path / RECORDS, self.path / MODEL])

    def average_path(self, average: str) -> Path:
        """The file of the model with averaged weights, such as model-sma.safetensors."""
        return (self.path / MODEL).with_stem(f"model-{average}")

    def has_model(self, spec: RunSpec) -> bool:
        """Whether the folder holds the final model of this run."""
        return (self.path / MODEL).exists() and load_info(self.path / MODEL).spec == spec

    def finished(self, spec: RunSpec) -> bool:
        """Whether the folder holds this run in finished form, with its model and all of its records."""
        runs = self._runs() if self.has_model(spec) else []
        if [run.spec for run in runs] != [spec] or runs[0].status == "running":
            return False
        last = spec.steps if runs[0].diverged_at is None else runs[0].diverged_at
        expected = [step for step in evaluation_steps(spec.steps, spec.checkpoint_every) if step < last]
        return bool(runs[0].steps.tolist() == expected)

    def _runs(self) -> list[RunRecord]:
        return read_runs(self.path / RECORDS) if (self.path / RECORDS).exists() else []

    def record(self) -> RunRecord:
        """The run's record."""
        runs = read_runs(self.path / RECORDS)
        if len(runs) != 1:
            raise SandmaskError(f"{self.path / RECORDS} should hold one run. Found {len(runs)}.")
        return runs[0]

    def _prepare(self, spec: RunSpec, dataset: Dataset) -> None:
        """Raise an error for a folder of a sweep or another run. If it holds this run with fewer steps, extend it."""
        if (self.path / "sweep.toml").exists():
            raise SandmaskError(f"{self.path} is the folder of a sweep. Choose another folder with --out.")
        runs = self._runs()
        found = [run.spec for run in runs]
        if (self.path / MODEL).exists():
            found.append(load_info(self.path / MODEL).spec)
        others = [other for other in found if other != spec]
        for other in others:
            if spec.steps <= other.steps or replace(spec, steps=other.steps) != other:
                raise SandmaskError(
                    f"{self.path} holds another run, {other.algorithm} on {other.dataset}: it differs in "
                    f"{', '.join(_differences(other, spec))}. Choose another folder with --out, or delete this folder."
                )
        names = tuple(dataset.environments)
        for run in runs:
            if run.env_names != names:
                raise SandmaskError(
                    f"{self.path} holds this run with the environments {printable(', '.join(run.env_names))}. The "
                    f"dataset now has {printable(', '.join(names))}. Restore the dataset, or choose another folder "
                    "with --out."
                )
        if others:
            is_saved = any((self.path / name).exists() for name in (CHECKPOINT, MODEL))
            with RecordWriter(self.path / RECORDS):  # raises an error if another process trains in this folder
                if is_saved:
                    extend_checkpoint(self.path / CHECKPOINT, others[0], spec)
                for name in (RECORDS, MODEL):  # files of the shorter run; its evaluations are in the checkpoint
                    (self.path / name).unlink(missing_ok=True)


def _differences(there: RunSpec, asked: RunSpec) -> Iterator[str]:
    """Describe each difference between two specs, with both values."""
    old, new = flat_spec(there), flat_spec(asked)
    for name in {**old, **new}:
        value, other = old.get(name, "absent"), new.get(name, "absent")
        if value != other:
            yield f"{name} ({value} there, {other} here)"


@contextmanager
def _out_of_memory_explained(device: torch.device) -> Iterator[None]:
    """Raise a user error if memory is too small for a model or a batch."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise SandmaskError(
            f"{device} ran out of memory. Use a smaller network or batch (--hparam batch_size=...), or free memory and "
            "rerun the same command to continue from the last checkpoint."
        ) from error


class _Recorder:
    """Writes the evaluations of a run to its record file while it trains, and to its loggers if there are any."""

    def __init__(self, writer: RecordWriter, stack: Stack, log: RunLog | None) -> None:
        self.writer = writer
        spec, dataset = stack.specs[0], stack.dataset
        self.run = writer.start(spec, dataset.environments, dataset.classes, stack.evaluator.sizes(0))
        self.log = log

    def catch_up(self, trainer: Trainer) -> None:
        """Make the file agree with the checkpoint: remove newer lines, and write lines that a crash has lost."""
        self.writer.rewind(self.run, trainer.done - 1)
        for step in trainer.history.steps:
            if step < trainer.done - 1:
                self.add(trainer, step)

    def add(self, trainer: Trainer, step: int) -> None:
        """Write an evaluation, unless it is already in the file or the run has diverged."""
        last = self.writer.last_step(self.run)
        is_new = last is None or step > last
        if 0 <= trainer.diverged_at[0] <= step or not (is_new or self.log):
            return
        accuracies = trainer.history.accuracies(step)
        metrics = {name: values[0] for name, values in trainer.history.means(step).items()}
        inside, outside = accuracies.inside[0].tolist(), accuracies.outside[0].tolist()
        if is_new:
            tables = {name: counts[0] for name, counts in trainer.history.tables(step).items()}
            self.writer.evaluation(self.run, step, inside, outside, metrics, tables)
        if self.log is not None:
            self.log.evaluation(step, inside, outside, metrics)

    def end(self, trainer: Trainer) -> Status:
        """Write the outcome of the run, done or diverged, and return it."""
        diverged_at = trainer.diverged_at[0]
        status: Literal["done", "diverged"] = "diverged" if diverged_at >= 0 else "done"
        self.writer.end(self.run, status, diverged_at if diverged_at >= 0 else trainer.done - 1)
        self.writer.commit()
        return status
