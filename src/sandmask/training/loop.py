"""The training loop: steps, evaluations, records, checkpoints. Killed at any moment, it goes on where it was."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sandmask.algorithms import Metrics, State
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch
from sandmask.records import RecordWriter
from sandmask.training.checkpoint import load_metadata, load_tree, save_tree
from sandmask.training.evaluation import Accuracies, is_evaluation_step
from sandmask.training.stack import Stack

CHECKPOINT_SECONDS = 30.0


@dataclass(frozen=True)
class Carry:
    """All that a stack carries from step to step. Replaced whole, so that an interrupt never sees half of it."""

    done: int  # steps taken
    state: State
    sums: Metrics  # [K] each, of the metrics since the last evaluation
    count: int  # steps in these sums
    diverged_at: Tensor  # [K], the first step with a loss that is no number; -1 for none

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"state": self.state, "sums": self.sums, "diverged_at": self.diverged_at}


@dataclass(frozen=True)
class Progress:
    """What a loop reports after every step; `accuracies` after an evaluation."""

    done: int
    steps: int
    losses: list[float] | None = None  # [K], means since the last evaluation
    accuracies: Accuracies | None = None


Report = Callable[[Progress], None]


class Trainer:
    """Trains a stack into a folder's record file and checkpoint, from wherever these stand."""

    def __init__(
        self,
        stack: Stack,
        writer: RecordWriter,
        checkpoint: Path,
        report: Report = lambda _: None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> None:
        self.stack = stack
        self.writer = writer
        self.checkpoint = checkpoint
        self.report = report
        self.checkpoint_seconds = checkpoint_seconds
        self.steps = stack.specs[0].steps
        self.every = stack.specs[0].checkpoint_every
        dataset = stack.dataset
        self.ids = [writer.start(spec, dataset.environments, dataset.classes) for spec in stack.specs]

    def run(self) -> State:
        """Train to the end, or until every run has diverged; return the final states."""
        carry = self._resume()
        feed = self.stack.feed(carry.done)
        saved = time.monotonic()
        try:
            while True:
                if carry.done and self._is_evaluation(carry.done):
                    self._record(carry)
                if carry.done == self.steps or not self._running():
                    break
                if time.monotonic() - saved > self.checkpoint_seconds:
                    self._save(carry)
                    saved = time.monotonic()
                carry = self._advance(carry, next(feed))
                self.report(Progress(carry.done, self.steps))
        except KeyboardInterrupt:
            self._save(carry)
            raise
        except torch.OutOfMemoryError as error:
            self._save(carry)
            raise SandmaskError(
                f"{self.stack.device} ran out of memory at step {carry.done}; what was done is saved. Give it a "
                "smaller network or batch (--hparam batch_size=...), or free memory and run the same command again."
            ) from error
        finally:
            feed.close()
        self._finish(carry)
        return carry.state

    def _is_evaluation(self, done: int) -> bool:
        return is_evaluation_step(done - 1, self.steps, self.every)

    def _running(self) -> list[int]:
        return [k for k, run in enumerate(self.ids) if self.writer.status(run) == "running"]

    def _advance(self, carry: Carry, batch: EnvBatch) -> Carry:
        state, metrics = self.stack.step(carry.state, batch)
        # Sums start anew after an evaluation; that is a function of `done` alone, so a resumed run agrees.
        fresh = carry.done == 0 or self._is_evaluation(carry.done)
        first_bad = (carry.diverged_at < 0) & ~torch.isfinite(metrics["loss"])
        return Carry(
            done=carry.done + 1,
            state=state,
            sums=metrics if fresh else {name: carry.sums[name] + value for name, value in metrics.items()},
            count=1 if fresh else carry.count + 1,
            diverged_at=torch.where(first_bad, carry.done, carry.diverged_at),
        )

    def _record(self, carry: Carry) -> None:
        """Evaluate and write a line for every run that has none for this step yet."""
        step = carry.done - 1
        todo = [k for k in self._running() if self.writer.last_step(self.ids[k]) != step]
        if not todo:
            return
        finite = torch.isfinite(carry.state["params"]).all(-1).tolist()
        diverged = carry.diverged_at.tolist()
        means = {name: (total / carry.count).tolist() for name, total in carry.sums.items()}
        accuracies = self.stack.evaluate(carry.state)
        for k in todo:
            if diverged[k] >= 0 or not finite[k]:
                self.writer.end(self.ids[k], "diverged", diverged[k] if diverged[k] >= 0 else step)
                continue
            metrics = {name: values[k] for name, values in means.items()}
            inside, outside = accuracies.inside[k].tolist(), accuracies.outside[k].tolist()
            self.writer.evaluation(self.ids[k], step, inside, outside, metrics)
        self.report(Progress(carry.done, self.steps, means["loss"], accuracies))

    def _finish(self, carry: Carry) -> None:
        self._save(carry)  # first: a run that is said to be done has its weights on the disk
        for k in self._running():
            self.writer.end(self.ids[k], "done", carry.done - 1)
        self.writer.commit()

    def _save(self, carry: Carry) -> None:
        self.writer.commit()
        metadata = {"runs": self.ids, "done": carry.done, "count": carry.count, "metrics": list(carry.sums)}
        save_tree(self.checkpoint, carry.tree(), metadata)

    def _start(self, metrics: Sequence[str] = ()) -> Carry:
        n_runs, device = self.stack.n_runs, self.stack.device
        sums = {name: torch.zeros(n_runs, device=device) for name in metrics}
        return Carry(0, self.stack.init(), sums, 0, torch.full((n_runs,), -1, device=device))

    def _resume(self) -> Carry:
        """The carry of the checkpoint, or a fresh one; records beyond it are forgotten, to be made again."""
        if not self.checkpoint.exists():
            carry = self._start()
        else:
            metadata = load_metadata(self.checkpoint)
            if metadata.get("runs") != self.ids:
                raise SandmaskError(f"{self.checkpoint} belongs to other runs. Choose another folder with --out.")
            template = self._start(metadata["metrics"])
            tree = load_tree(self.checkpoint, template.tree(), self.stack.device)
            carry = Carry(done=metadata["done"], count=metadata["count"], **tree)
        if self._running():
            self.writer.rewind(self.ids, carry.done - 1)
        return carry
