"""The evaluations of a stack while it trains, on its device and in its checkpoint."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sandmask._devices import widest_float
from sandmask.algorithms import DIAGNOSTICS, diagnostic_names
from sandmask.records import MEASURES, RunRecord, Status, average_metrics
from sandmask.training.averaging import average_metric
from sandmask.training.evaluation import Accuracies, evaluation_steps
from sandmask.training.stack import Stack


class History:
    """T evaluations of K runs.

    It holds the numbers of correct predictions [T, K, G], and the mean of every metric since the previous evaluation
    [T, K]. Mask diagnostics, averages and metrics beyond accuracy are vectors, [T, K, M], whose entries have names.
    Tables, such as confusion matrices, have entries without names.

    Writing never waits for the device.
    """

    def __init__(self, stack: Stack) -> None:
        spec = stack.specs[0]
        self.steps = list(evaluation_steps(spec.steps, spec.checkpoint_every))
        self.stack = stack
        self.counts = torch.zeros(len(self.steps), *stack.evaluator.shape, device=stack.device)
        self.curves: dict[str, Tensor] = {}

    def row(self, step: int) -> int:
        """The index of the evaluation at this step, or of the next evaluation."""
        return bisect_left(self.steps, step)

    def _entries(self, name: str) -> list[str] | None:
        """The names of the entries of a metric. A number has its own name, and a table has none (None).

        The metrics of an average are named like `average/sma/confusion`.
        """
        n_envs = len(self.stack.dataset.environments)
        prefix, slash, last = name.rpartition("/")
        if name == DIAGNOSTICS:
            return diagnostic_names(self.stack.algorithm.network.slots)
        if name in map(average_metric, self.stack.averages):
            return average_metrics(last, n_envs)
        if last not in self.stack.evaluator.metrics:
            return [name]
        return (
            None if MEASURES[last].is_table else [f"{prefix}{slash}{each}" for each in MEASURES[last].entries(n_envs)]
        )

    def zeros(self, name: str) -> Tensor:
        """Zeros for a metric of all runs: [K], or [K, M]."""
        n_runs, device, dataset = self.stack.n_runs, self.stack.device, self.stack.dataset
        entries = self._entries(name)
        if entries is None:  # a table of integers, which float32 represents exactly
            table = MEASURES[name.rpartition("/")[2]]
            return torch.zeros(n_runs, table.size(len(dataset.environments), len(dataset.classes)), device=device)
        if entries == [name]:
            return torch.zeros(n_runs, device=device)
        dtype = torch.float32 if name == DIAGNOSTICS else widest_float(device)
        return torch.zeros(n_runs, len(entries), device=device, dtype=dtype)

    def open_curves(self, names: Iterable[str]) -> None:
        """Allocate curves of these metrics, filled with NaN."""
        for name in names:
            self.curves[name] = torch.stack([self.zeros(name)] * len(self.steps)).fill_(torch.nan)

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"counts": self.counts, "curves": self.curves}

    def write(self, step: int, counts: Tensor, sums: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Store an evaluation. Storing it again after a restart changes nothing.

        :param step: step of the evaluation.
        :param counts: numbers of correct predictions [K, G].
        :param sums: sums of metrics since the previous evaluation.
        :param now: metrics of the current state.
        """
        row = self.row(step)
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
            if (entries := self._entries(name)) is not None:
                curves.update({name: curve} if entries == [name] else zip(entries, curve.unbind(-1), strict=True))
        return curves

    def accuracies(self, step: int) -> Accuracies:
        """The accuracies of one evaluation. Waits for the device."""
        return self.stack.evaluator.fractions(self.counts[self.row(step)])

    def means(self, step: int) -> dict[str, list[float]]:
        """Every metric [K] of one evaluation. Waits for the device."""
        row = self.row(step)
        curves = self._named()
        values = torch.stack([curve[row] for curve in curves.values()]).tolist()  # one transfer for all metrics
        return dict(zip(curves, values, strict=True))

    def _tables(self) -> dict[str, Tensor]:
        """Every table [T, K, M] by its name."""
        return {name: curve for name, curve in self.curves.items() if self._entries(name) is None}

    def tables(self, step: int) -> dict[str, list[list[int]]]:
        """The counts [K, M] of every table at one evaluation. Waits for the device."""
        row = self.row(step)
        return {name: counts[row].nan_to_num(0.0).long().tolist() for name, counts in self._tables().items()}

    def records(self, done: int, diverged_at: Tensor, pruned_at: Mapping[int, int]) -> list[RunRecord]:
        """The records of the runs after `done` steps.

        A run that diverged has its evaluations before that, and a pruned run has those up to its step in `pruned_at`.
        """
        accuracies = self.stack.evaluator.fractions(self.counts)
        curves = {name: curve.cpu().double().numpy() for name, curve in self._named().items()}
        # SWAD has counts only at the last evaluation. Its other rows are left out, like its accuracies.
        tables = {name: curve.nan_to_num(0.0).long().cpu().numpy() for name, curve in self._tables().items()}
        steps, dataset = np.array(self.steps), self.stack.dataset
        records = []
        for k, (spec, end) in enumerate(zip(self.stack.specs, diverged_at.tolist(), strict=True)):
            status: Status
            if end >= 0:
                status, last = "diverged", end - 1
            elif k in pruned_at:
                status, last = "pruned", pruned_at[k]
            else:
                status, last = "done" if done == spec.steps else "running", done - 1
            kept = steps <= last
            record = RunRecord(
                spec=spec,
                env_names=tuple(dataset.environments),
                steps=steps[kept],
                accuracy_in=accuracies.inside[kept, k],
                accuracy_out=accuracies.outside[kept, k],
                metrics={name: curve[kept, k] for name, curve in curves.items()},
                status=status,
                diverged_at=end if end >= 0 else None,
                classes=tuple(dataset.classes),
                sizes=self.stack.evaluator.sizes(k),
                tables={name: counts[kept, k] for name, counts in tables.items()},
            )
            records.append(record)
        return records
