"""The evaluations of a stack while it trains: on its device, and in its checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sandmask.algorithms import DIAGNOSTICS, diagnostic_names
from sandmask.records import MEASURES, Measure, RunRecord, Status, average_metrics
from sandmask.training.averaging import average_metric
from sandmask.training.evaluation import Accuracies, evaluation_steps
from sandmask.training.stack import Stack


class History:
    """T evaluations of K runs: right answers [T, K, G], and the mean of every metric since the one before, [T, K].

    Mask diagnostics, averages and metrics beyond accuracy are vectors, [T, K, M]; readers find their entries by name.
    Those that are tables have no names of entries, and go to the records' tables.

    Writing into it never waits for the device.
    """

    def __init__(self, stack: Stack) -> None:
        spec = stack.specs[0]
        self.steps = list(evaluation_steps(spec.steps, spec.checkpoint_every))
        self.stack = stack
        self.counts = torch.zeros(len(self.steps), *stack.evaluator.shape, device=stack.device)
        self.curves: dict[str, Tensor] = {}

    def _entries(self, name: str) -> list[str] | None:
        """The names of the entries of a metric that is a vector; None for one that is a number."""
        if name == DIAGNOSTICS:
            return diagnostic_names(self.stack.algorithm.network.slots)
        n_envs = len(self.stack.dataset.environments)
        for average in self.stack.averages:
            if name == average_metric(average):
                return average_metrics(average, n_envs)
        prefix, measure = self._measure(name)
        return None if measure is None else [f"{prefix}{entry}" for entry in measure.entries(n_envs)]

    def _measure(self, name: str) -> tuple[str, Measure | None]:
        """The metric beyond accuracy of this name, and what comes before it: that of an average, `average/sma/f1`."""
        prefix, slash, last = name.rpartition("/")
        known = last in self.stack.evaluator.metrics
        return prefix + slash, MEASURES[last] if known else None

    def _is_table(self, name: str) -> bool:
        measure = self._measure(name)[1]
        return measure is not None and measure.is_table

    def zeros(self, name: str) -> Tensor:
        """A metric of all runs: [K], or [K, M]."""
        measure = self._measure(name)[1]
        names = self._entries(name)
        width = None if names is None else len(names)
        if measure is not None:
            width = measure.size(len(self.stack.dataset.environments), len(self.stack.dataset.classes))
        exact = names is not None and name != DIAGNOSTICS and not self._is_table(name)  # counts are, in float32
        shape = (self.stack.n_runs,) if width is None else (self.stack.n_runs, width)
        return torch.zeros(shape, device=self.stack.device, dtype=torch.float64 if exact else torch.float32)

    def open_curves(self, names: Iterable[str]) -> None:
        """Make room for these metrics; what is never written stays NaN."""
        for name in names:
            self.curves[name] = torch.stack([self.zeros(name)] * len(self.steps)).fill_(torch.nan)

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"counts": self.counts, "curves": self.curves}

    def write(self, step: int, counts: Tensor, sums: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Note an evaluation, with sums of metrics since the one before, and metrics of the present state.

        Noted again after a restart, it is the same.
        """
        row = self.steps.index(step) if step == self.steps[-1] else step // self.stack.specs[0].checkpoint_every
        since = step - self.steps[row - 1] if row > 0 else 1
        self.open_curves([name for name in (*sums, *now) if name not in self.curves])
        self.counts[row] = counts
        for name, total in sums.items():
            self.curves[name][row] = total / since
        for name, value in now.items():
            self.curves[name][row] = value

    def _named(self) -> dict[str, Tensor]:
        """Every metric [T, K] by its name, without tables."""
        curves: dict[str, Tensor] = {}
        for name, curve in self.curves.items():
            if self._is_table(name):
                continue
            names = self._entries(name)
            curves.update({name: curve} if names is None else zip(names, curve.unbind(-1), strict=True))
        return curves

    def accuracies(self, step: int) -> Accuracies:
        """Accuracies of one evaluation; waits for the device."""
        return self.stack.evaluator.fractions(self.counts[self.steps.index(step)])

    def means(self, step: int) -> dict[str, list[float]]:
        """Every metric [K] of one evaluation; waits for the device."""
        row = self.steps.index(step)
        curves = self._named()
        values = torch.stack([curve[row] for curve in curves.values()]).tolist()  # one transfer, not one a metric
        return dict(zip(curves, values, strict=True))

    def _tables(self) -> dict[str, Tensor]:
        """Every table [T, K, M] by its name."""
        return {name: curve for name, curve in self.curves.items() if self._is_table(name)}

    def tables(self, step: int) -> dict[str, list[list[int]]]:
        """The counts [K, M] of every table at one evaluation; waits for the device."""
        row = self.steps.index(step)
        return {name: counts[row].nan_to_num(0.0).long().tolist() for name, counts in self._tables().items()}

    def records(self, done: int, diverged_at: Tensor, pruned_at: Mapping[int, int]) -> list[RunRecord]:
        """The runs' records after `done` steps; a run that diverged keeps its evaluations from before that.

        Of a run that was pruned, those until then; `pruned_at` has the step of each.
        """
        accuracies = self.stack.evaluator.fractions(self.counts)
        curves = {name: curve.double().cpu().numpy() for name, curve in self._named().items()}
        # SWAD has counts at the last evaluation only; what it has none of is left out with its accuracies.
        tables = {name: curve.nan_to_num(0.0).long().cpu().numpy() for name, curve in self._tables().items()}
        ends = diverged_at.tolist()
        steps = np.array(self.steps)
        dataset = self.stack.dataset

        def status(k: int) -> Status:
            ended: Status = "done" if done == self.stack.specs[k].steps else "running"
            return "diverged" if ends[k] >= 0 else "pruned" if k in pruned_at else ended

        def record(k: int) -> RunRecord:
            kept = steps < (ends[k] if ends[k] >= 0 else pruned_at.get(k, done - 1) + 1)
            return RunRecord(
                spec=self.stack.specs[k],
                env_names=tuple(dataset.environments),
                steps=steps[kept],
                accuracy_in=accuracies.inside[kept, k],
                accuracy_out=accuracies.outside[kept, k],
                metrics={name: curve[kept, k] for name, curve in curves.items()},
                status=status(k),
                diverged_at=ends[k] if ends[k] >= 0 else None,
                classes=tuple(dataset.classes),
                tables={name: counts[kept, k] for name, counts in tables.items()},
            )

        return [record(k) for k in range(self.stack.n_runs)]
