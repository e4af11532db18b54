"""Accuracy of K runs on every environment's "in" and "out" split."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.training.splits import split_environment

Predict = Callable[[Tensor], Tensor]  # inputs [N, ...] or [K, N, ...] -> logits [K, N, C]


@dataclass(frozen=True)
class Accuracies:
    """Fractions in 0..1, one row a run and one column an environment."""

    inside: NDArray[np.float64]  # [K, environments]
    outside: NDArray[np.float64]  # [K, environments]


class Evaluator:
    """Counts right answers. Group 2e is environment e's "in" split, group 2e + 1 its "out" split."""

    def __init__(self, dataset: Dataset, specs: Sequence[RunSpec], device: torch.device, chunk: int) -> None:
        self.dataset = dataset
        self.chunk = chunk
        trials = sorted({spec.trial_seed for spec in specs})
        groups = [self._groups(dataset, trial) for trial in trials]
        self._trial_of_run = torch.tensor([trials.index(spec.trial_seed) for spec in specs], device=device)
        self._members = [[members.to(device) for members in trial] for trial in groups]
        self._sizes = np.array([[len(members) for members in groups[trials.index(s.trial_seed)]] for s in specs])
        self._group_of = torch.stack([self._membership(trial, len(dataset.labels)) for trial in groups]).to(device)

    @staticmethod
    def _groups(dataset: Dataset, trial: int) -> list[Tensor]:
        envs = range(len(dataset.environments))
        return [members for env in envs for members in split_environment(dataset, env, trial)]

    @staticmethod
    def _membership(groups: list[Tensor], n_examples: int) -> Tensor:
        group_of = torch.empty(n_examples, dtype=torch.int64)
        for number, members in enumerate(groups):
            group_of[members] = number
        return group_of

    def alone(self, predict: Predict) -> Accuracies:
        """For methods whose prediction of an example depends on that example alone: any batches will do."""
        counts = torch.zeros(self._sizes.shape, device=self._group_of.device)
        chunks = torch.split(torch.arange(len(self.dataset.labels), device=counts.device), self.chunk)
        for numbers, x in zip(chunks, self.dataset.batches(chunks), strict=True):
            right = predict(x).argmax(-1) == self.dataset.labels[numbers]
            groups = self._group_of[:, numbers][self._trial_of_run]
            # Whole numbers below 2^24 add up exactly in float32, in any order.
            counts = counts.scatter_add(1, groups, right.to(counts.dtype))
        return self._fractions(counts)

    def in_context(self, predict: Predict, batch_size: int = 64) -> Accuracies:
        """For methods that look at the whole batch: batches of one environment and one split, as DomainBed's."""
        columns = []
        for group in range(self._sizes.shape[1]):
            members = torch.stack([trial[group] for trial in self._members])[self._trial_of_run]  # [K, n]
            hits = [self._hits(predict, numbers) for numbers in torch.split(members, batch_size, dim=1)]
            columns.append(torch.stack(hits).sum(0))
        return self._fractions(torch.stack(columns, dim=1))

    def _hits(self, predict: Predict, numbers: Tensor) -> Tensor:
        right = predict(self.dataset.inputs(numbers)).argmax(-1) == self.dataset.labels[numbers]
        return right.sum(1)

    def _fractions(self, counts: Tensor) -> Accuracies:
        fractions = counts.cpu().numpy().astype(np.float64) / np.maximum(self._sizes, 1)
        return Accuracies(fractions[:, 0::2], fractions[:, 1::2])


def evaluation_steps(steps: int, every: int) -> Iterator[int]:
    """The steps after which a run is evaluated: every so many, and the last."""
    return (step for step in range(steps) if is_evaluation_step(step, steps, every))


def is_evaluation_step(step: int, steps: int, every: int) -> bool:
    """Whether a run is evaluated after this step."""
    return step % every == 0 or step == steps - 1
