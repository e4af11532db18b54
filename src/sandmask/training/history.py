"""The evaluations of a stack while it trains: on its device, and in its checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sandmask.algorithms import DIAGNOSTICS, diagnostic_names
from sandmask.records import RunRecord
from sandmask.training.evaluation import Accuracies, evaluation_steps
from sandmask.training.stack import Stack


class History:
    """T evaluations of K runs: right answers [T, K, G], and the mean of every metric since the one before, [T, K].

    Mask diagnostics are one metric that is a vector, [T, K, M]; whoever reads finds its entries by their names.

    Writing into it never waits for the device.
    """

    def __init__(self, stack: Stack) -> None:
        spec = stack.specs[0]
        self.steps = list(evaluation_steps(spec.steps, spec.checkpoint_every))
        self.stack = stack
        self.counts = torch.zeros(len(self.steps), *stack.evaluator.shape, device=stack.device)
        self.curves: dict[str, Tensor] = {}

    def zeros(self, name: str) -> Tensor:
        """A metric of all runs: [K], or [K, M]."""
        names = diagnostic_names(self.stack.algorithm.network.slots) if name == DIAGNOSTICS else None
        shape = (self.stack.n_runs,) if names is None else (self.stack.n_runs, len(names))
        return torch.zeros(shape, device=self.stack.device)

    def open_curves(self, names: Iterable[str]) -> None:
        """Make room for these metrics."""
        self.curves = {name: torch.stack([self.zeros(name)] * len(self.steps)) for name in names}

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"counts": self.counts, "curves": self.curves}

    def write(self, step: int, counts: Tensor, sums: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Note an evaluation, with sums of metrics since the one before, and metrics of the present state.

        Noted again after a restart, it is the same.
        """
        row = self.steps.index(step) if step == self.steps[-1] else step // self.stack.specs[0].checkpoint_every
        since = step - self.steps[row - 1] if row > 0 else 1
        if not self.curves:
            self.open_curves([*sums, *now])
        self.counts[row] = counts
        for name, total in sums.items():
            self.curves[name][row] = total / since
        for name, value in now.items():
            self.curves[name][row] = value

    def _named(self) -> dict[str, Tensor]:
        """Every metric [T, K] by its name."""
        curves = {name: curve for name, curve in self.curves.items() if name != DIAGNOSTICS}
        if DIAGNOSTICS in self.curves:
            names = diagnostic_names(self.stack.algorithm.network.slots)
            curves.update(zip(names, self.curves[DIAGNOSTICS].unbind(-1), strict=True))
        return curves

    def accuracies(self, step: int) -> Accuracies:
        """Those of one evaluation; waits for the device."""
        return self.stack.evaluator.fractions(self.counts[self.steps.index(step)])

    def means(self, step: int) -> dict[str, list[float]]:
        """Every metric [K] of one evaluation; waits for the device."""
        row = self.steps.index(step)
        curves = self._named()
        values = torch.stack([curve[row] for curve in curves.values()]).tolist()  # one transfer, not one a metric
        return dict(zip(curves, values, strict=True))

    def records(self, done: int, diverged_at: Tensor) -> list[RunRecord]:
        """The runs' records after `done` steps; a run that diverged keeps its evaluations from before that."""
        accuracies = self.stack.evaluator.fractions(self.counts)
        curves = {name: curve.double().cpu().numpy() for name, curve in self._named().items()}
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
