"""The training loop: steps, evaluations and checkpoints. It can resume after a crash at any time."""

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sandmask._signals import deferred, drop_signals
from sandmask._torchrun import LostProcessError, say_once
from sandmask.algorithms import Metrics, State
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.plugins import plugin_failures_named
from sandmask.records import RunRecord, RunSpec
from sandmask.training.averaging import average_metric, evaluate_swad
from sandmask.training.checkpoint import load_metadata, load_tree, save_tree
from sandmask.training.cuda_graph import Carry, Program
from sandmask.training.evaluation import Accuracies, OnBatch
from sandmask.training.history import History
from sandmask.training.keeping import Keeper, save_models
from sandmask.training.precision import stack_settings
from sandmask.training.processes import AgreedStop, check_equal
from sandmask.training.schedule import step_plateau
from sandmask.training.stack import Stack, without_averages

CHECKPOINT_SECONDS = 30.0
PROGRESS_SECONDS = 0.5  # on a GPU, between calls of `on_progress` with losses, because these wait for the device
MOST_QUEUED = 2  # calls of `Program.advance` that are queued on a GPU before the host waits

# Options that cannot change when a run is resumed: their names in checkpoints, and their text for the user.
_FIXED_OPTIONS: dict[str, Callable[[Any], str]] = {
    "diagnostics": lambda on: f"{'with' if on else 'without'} --diagnostics",
    "measures": lambda names: f"with --metrics {','.join(names)}" if names else "without --metrics",
    "train_eval_limit": lambda n: "without --train-eval-limit" if n is None else f"with --train-eval-limit {n}",
    "keeps": lambda _: "with other --keep-models",
}


@dataclass(frozen=True)
class Progress:
    """The progress of a loop, reported every few steps. After most evaluations, it has losses and accuracies."""

    done: int
    steps: int
    losses: list[float] | None = None  # [K], mean losses since the previous evaluation
    accuracies: Accuracies | None = None


OnProgress = Callable[[Progress], None]


class Trainer:
    """Trains a stack to its end, starting from its checkpoint if there is one.

    See `train_stack` for the arguments. `evaluating` is called during an evaluation with the numbers of evaluated
    examples and of all examples. When `on_evaluation` is called, `history` and `diverged_at` are up to date. It may
    prune runs (by setting their step in `pruned_at`), and may set `stopping`, which ends the loop with a checkpoint.
    """

    def __init__(
        self,
        stack: Stack,
        checkpoint: Path,
        on_progress: OnProgress = lambda _: None,
        *,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        fast: bool = True,
        keep: str = "none",
        on_evaluation: Callable[["Trainer", int], None] | None = None,
        evaluating: OnBatch | None = None,
    ) -> None:
        self.stack = stack
        self.checkpoint = checkpoint
        self.on_progress = on_progress
        self.checkpoint_seconds = checkpoint_seconds
        self.on_evaluation = on_evaluation
        self._stop = AgreedStop(stack.ranks)
        stack.evaluator.on_batch = self._stop.within(evaluating)
        self.steps = stack.specs[0].steps
        self.pruned_at: dict[int, int] = {}
        self.stopping = False
        self.history = History(stack)
        self.keeper = Keeper(stack, keep)
        self.program = Program(stack, self._begin(), fast=fast and stack.ranks.size == 1)
        self._reported_at = self._saved_at = time.monotonic()
        self._queued: deque[torch.cuda.Event] = deque()

    @property
    def done(self) -> int:
        """The number of steps taken so far."""
        return self.program.done

    @property
    def diverged_at(self) -> list[int]:
        """The step at which each run diverged, or -1. Waits for the device."""
        found: list[int] = self.program.carry.diverged_at.tolist()
        return found

    def run(self) -> State:
        """Train to the end, until every run has diverged, or until `stopping` is set. Return the final states."""
        settings = stack_settings(self.stack.specs[0].precision, self.stack.device)
        with deferred(signal.SIGINT, signal.SIGTERM), settings:
            self._run()
        return self.program.carry.state

    def _run(self) -> None:
        evaluated = frozenset(self.history.steps)
        try:
            while True:
                self._stop()
                is_over = self.done - 1 in evaluated and self._evaluate()
                if self.done == self.steps or is_over:
                    self._stop(now=True)
                    break
                if time.monotonic() - self._saved_at > self.checkpoint_seconds:
                    self.save()
                next_evaluation = self.history.steps[self.history.row(self.done)]
                self.program.advance(next_evaluation + 1 - self.done)
                self._wait_for_earlier_work()
                self.on_progress(Progress(self.done, self.steps))
        except LostProcessError as error:
            self.save()
            say_once(f"error: {error}")  # while signals are deferred, because torchrun also ends the other processes
            drop_signals()
            raise
        except (KeyboardInterrupt, torch.OutOfMemoryError):
            self.save()
            raise
        finally:
            self.program.close()

    def records(self) -> list[RunRecord]:
        """The records of the runs so far."""
        return self.history.records(self.program.carry.done, self.program.carry.diverged_at, self.pruned_at)

    def kept(self) -> tuple[dict[str, State], dict[str, list[int]]]:
        """The states to keep and their steps, for each kind of weights: see `Keeper`. Pruned runs have step -1."""
        states, steps = self.keeper.final(self.program.carry.state, self.diverged_at)
        return states, {
            kind: [-1 if k in self.pruned_at else s for k, s in enumerate(of)] for kind, of in steps.items()
        }

    def _evaluate(self) -> bool:
        """Evaluate and record. Return whether to end the training, by request or because every run has diverged."""
        step = self.done - 1
        self._mark_diverged(step)
        state = self.program.carry.state
        check_equal(self.stack.ranks, state)
        right, metrics = self.program.evaluate()
        metrics = {**metrics, **self.stack.held_out(state), **self._evaluate_swad(metrics["validation_loss"])}
        metrics |= self._drop_learning_rates(step, metrics)
        self.history.write(step, right, self.program.carry.sums, metrics)
        if self.keeper.keeps_best:
            outside = self.history.accuracies(step).outside
            self.keeper.update(step, self.program.carry.state, outside, metrics, self.diverged_at)
        if self.on_evaluation is not None:
            self.on_evaluation(self, step)
            if self.stopping:
                self.save()
                return True
        host_waits = self.stack.device.type != "cpu"
        if host_waits and step < self.steps - 1 and time.monotonic() - self._reported_at < PROGRESS_SECONDS:
            return False
        losses = self.history.means(step)["loss"]
        self.on_progress(Progress(self.done, self.steps, losses, self.history.accuracies(step)))
        self._reported_at = time.monotonic()
        return min(self.diverged_at) >= 0

    def _mark_diverged(self, step: int) -> None:
        """Mark runs whose parameters contain NaN or inf as diverged. Steps detect a loss that is NaN or inf."""
        carry = self.program.carry
        finite = torch.isfinite(carry.state["params"]).all(-1)
        carry.diverged_at.copy_(torch.where((carry.diverged_at < 0) & ~finite, step, carry.diverged_at))

    def _evaluate_swad(self, validation_loss: torch.Tensor) -> Metrics:
        """Update SWAD's average; after the last step, return its accuracies."""
        averages = self.program.carry.state.get("averages", {})
        if "swad" not in averages:
            return {}
        swad = evaluate_swad(averages["swad"], validation_loss.float(), self.stack.hparams)
        self.program.replace_state(averages={**averages, "swad": swad})
        if self.done < self.steps:
            return {}
        return self.stack.evaluate_average(*without_averages(self.program.carry.state), "swad")

    def _drop_learning_rates(self, step: int, metrics: Metrics) -> Metrics:
        """Lower the learning rates of runs whose validation loss (with SMA, the loss of the average) stops falling."""
        plateau = self.program.carry.state.get("plateau")
        if plateau is None:
            return {}
        of_sma = metrics.get(average_metric("sma"))
        loss = metrics["validation_loss"] if of_sma is None else of_sma[:, -1]
        plateau = step_plateau(plateau, loss.float(), step, self.stack.hparams)
        self.program.replace_state(plateau=plateau)
        return {"lr_drops": plateau["drops"].clone()}

    def _wait_for_earlier_work(self) -> None:
        """Limit the work in the queue of a GPU, so that an interrupt does not wait for minutes."""
        if self.stack.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.stack.device))
        self._queued.append(event)
        if len(self._queued) > MOST_QUEUED:
            self._queued.popleft().synchronize()

    def save(self) -> None:
        """Write the checkpoint. Only the first process does this."""
        if not self.stack.ranks.first:
            return
        carry = self.program.carry
        names = {"metrics": list(carry.sums), "curves": list(self.history.curves)}
        runs = [spec.id for spec in self.stack.specs]
        save_tree(self.checkpoint, self._tree(carry), {"runs": runs, "done": carry.done, **self._options(), **names})
        self._saved_at = time.monotonic()

    def _tree(self, carry: Carry) -> dict[str, Any]:
        kept = {"kept": self.keeper.tree()} if self.keeper.keeps_best else {}
        return {**carry.tree(), "history": self.history.tree(), **kept}

    def _begin(self) -> Carry:
        """The initial carry, which all processes copy from the first process."""
        ranks = self.stack.ranks
        with ranks.together():
            carry = self._resume()
        names = ranks.of_first(list(carry.sums))
        carry.sums = {name: carry.sums.get(name, self.history.zeros(name)) for name in names}
        ranks.copy_first(pytree.tree_leaves(carry.tree()))
        return carry

    def _resume(self) -> Carry:
        """A new carry. In the first process, the carry of the checkpoint if there is one."""
        not_diverged = torch.full((self.stack.n_runs,), -1, device=self.stack.device)
        carry = Carry(self.stack.init(), {}, not_diverged)
        self.keeper.start(carry.state)
        if not self.stack.ranks.first or not self.checkpoint.exists():
            return carry
        metadata = load_metadata(self.checkpoint)
        if metadata.get("runs") != [spec.id for spec in self.stack.specs]:
            raise SandmaskError(f"{self.checkpoint} belongs to other runs. Choose another folder with --out.")
        self._check_options(metadata)
        carry.sums = {name: self.history.zeros(name) for name in metadata["metrics"]}
        self.history.open_curves(metadata["curves"])
        tree = load_tree(self.checkpoint, self._tree(carry), self.stack.device)
        history = tree.pop("history")
        if "kept" in tree:
            self.keeper.restore(tree.pop("kept"))
        self.history.counts, self.history.curves = history["counts"], history["curves"]
        return Carry(**tree)

    def _options(self) -> dict[str, Any]:
        """The values of `_FIXED_OPTIONS`."""
        evaluator = self.stack.evaluator
        return {
            "diagnostics": self.stack.diagnostics,
            "measures": list(evaluator.metrics),
            "train_eval_limit": evaluator.train_examples,
            "keeps": "best" if self.keeper.keeps_best else "last",
        }

    def _check_options(self, metadata: dict[str, Any]) -> None:
        """Raise an error if the run of the checkpoint was started with other options."""
        in_old_files = {"diagnostics": False, "measures": [], "train_eval_limit": None, "keeps": "last"}
        before, now = {**in_old_files, **metadata}, self._options()
        for name, described in _FIXED_OPTIONS.items():
            if before[name] != now[name]:
                how = described(before[name])
                raise SandmaskError(
                    f"The run of {self.checkpoint} was started {how}. Use the same option, or delete the file to start "
                    "over."
                )


def train_stack(
    specs: Sequence[RunSpec],
    dataset: Dataset,
    device: torch.device,
    checkpoint: Path,
    *,
    weights: str | None = None,
    compiled: bool = False,
    fast: bool = True,
    diagnostics: bool = False,
    metrics: Sequence[str] = (),
    train_eval_limit: int | None = None,
    keep: str = "none",
    models: Path | None = None,
    on_progress: OnProgress = lambda _: None,
    on_evaluation: Callable[[Trainer, int], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[RunRecord]:
    """Train runs with the same `stack_key` as one program, and return their records, each done or diverged.

    Evaluations are stored in `checkpoint` until the end. After an interruption, the same call continues from there. The
    caller writes the records, and then deletes the checkpoint.

    :param specs: specs of the runs.
    :param dataset: the dataset.
    :param device: where to train.
    :param checkpoint: checkpoint file.
    :param weights: file with pretrained weights of a timm network, or "none".
    :param compiled: compile the network.
    :param fast: use CUDA graphs on a GPU.
    :param diagnostics: also record metrics of masks and gradients; nothing else changes.
    :param metrics: names of `records.MEASURES` to record; nothing else changes.
    :param train_eval_limit: largest number of examples of each training environment on which accuracies are computed;
        all examples if not given. Validation and held-out examples are always all evaluated.
    :param keep: which weights of the runs to keep, "best" or "last": see `keeping`.
    :param models: file for the kept weights.
    :param on_progress: called with a `Progress` after every few steps and every evaluation.
    :param on_evaluation: called with the trainer and the step after every evaluation. If it sets `trainer.stopping`,
        training ends with a checkpoint, and the records of the runs that it has not pruned are "running".
    :param checkpoint_seconds: seconds between checkpoints.
    """
    with plugin_failures_named():
        trainer = Trainer(
            Stack(
                specs,
                dataset,
                device,
                weights=weights,
                compiled=compiled,
                diagnostics=diagnostics,
                metrics=metrics,
                train_eval_limit=train_eval_limit,
            ),
            checkpoint,
            on_progress,
            checkpoint_seconds=checkpoint_seconds,
            fast=fast,
            keep=keep,
            on_evaluation=on_evaluation,
        )
        trainer.run()
        records = trainer.records()
        if not trainer.stopping and keep != "none" and models is not None:
            save_models(models, trainer.stack, *trainer.kept(), records)
    return records
