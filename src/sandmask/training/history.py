"""The evaluations of a stack while it trains: on its device, and in its checkpoint."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sandmask.records import RunRecord
from sandmask.training.evaluation import Accuracies, evaluation_steps
from sandmask.training.stack import Stack


class History:
    """T evaluations of K runs: right answers [T, K, G], and the mean of every metric since the one before, [T, K].

    Writing into it never waits for the device.
    """

    def __init__(self, stack: Stack) -> None:
        spec = stack.specs[0]
        self.steps = list(evaluation_steps(spec.steps, spec.checkpoint_every))
        self.stack = stack
        self.counts = torch.zeros(len(self.steps), *stack.evaluator.shape, device=stack.device)
        self.curves: dict[str, Tensor] = {}

    def open_curves(self, names: Mapping[str, object] | list[str]) -> None:
        """Make room for these metrics."""
        shape = len(self.steps), self.stack.n_runs
        self.curves = {name: torch.zeros(shape, device=self.stack.device) for name in names}

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"counts": self.counts, "curves": self.curves}

    def write(self, step: int, counts: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Note an evaluation; noted again after a restart, it is the same."""
        row = self.steps.index(step) if step == self.steps[-1] else step // self.stack.specs[0].checkpoint_every
        since = step - self.steps[row - 1] if row > 0 else 1
        if not self.curves:
            self.open_curves(sums)
        self.counts[row] = counts
        for name, total in sums.items():
            self.curves[name][row] = total / since

    def accuracies(self, step: int) -> Accuracies:
        """Those of one evaluation; waits for the device."""
        return self.stack.evaluator.fractions(self.counts[self.steps.index(step)])

    def means(self, step: int) -> dict[str, list[float]]:
        """Every metric [K] of one evaluation; waits for the device."""
        row = self.steps.index(step)
        return {name: curve[row].tolist() for name, curve in self.curves.items()}

    def records(self, done: int, diverged_at: Tensor) -> list[RunRecord]:
        """The runs' records after `done` steps; a run that diverged keeps its evaluations from before that."""
        accuracies = self.stack.evaluator.fractions(self.counts)
        curves = {name: curve.double().cpu().numpy() for name, curve in self.curves.items()}
        ends = diverged_at.tolist()
        steps = np.array(self.steps)
        dataset = self.stack.dataset

        def record(k: int) -> RunRecord:
            kept = steps < (ends[k] if ends[k] >= 0 else done)
            return RunRecord(
                spec=self.stack.specs[k],
                env_names=tuple(dataset.environments),
                steps=steps[kept],
                accuracy_in=accuracies.inside[kept, k],
                accuracy_out=accuracies.outside[kept, k],
                metrics={name: curve[kept, k] for name, curve in curves.items()},
                status="diverged" if ends[k] >= 0 else "done" if done == self.stack.specs[k].steps else "running",
                diverged_at=ends[k] if ends[k] >= 0 else None,
                classes=tuple(dataset.classes),
            )

        return [record(k) for k in range(self.stack.n_runs)]
