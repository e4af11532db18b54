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
    """Counts right answers: [K, G] in float32, exact. Group 2e is environment e's "in" split, 2e + 1 its "out" split.

    Counting never waits for the device, so that it can be part of a captured program.
    """

    def __init__(self, dataset: Dataset, specs: Sequence[RunSpec], device: torch.device, chunk: int) -> None:
        self.dataset = dataset
        trials = sorted({spec.trial_seed for spec in specs})
        groups = [self._groups(dataset, trial) for trial in trials]
        self._trial_of_run = torch.tensor([trials.index(spec.trial_seed) for spec in specs], device=device)
        self._members = [[members.to(device) for members in trial] for trial in groups]
        self._sizes = np.array([[len(members) for members in groups[trials.index(s.trial_seed)]] for s in specs])
        # [N, trials, G], 1 where an example is in a group: sums over groups are one product of matrices.
        self._belongs = torch.stack([self._membership(trial, len(dataset.labels)) for trial in groups], 1).to(device)
        self._chunks = torch.split(torch.arange(len(dataset.labels), device=device), chunk)

    @staticmethod
    def _groups(dataset: Dataset, trial: int) -> list[Tensor]:
        envs = range(len(dataset.environments))
        return [members for env in envs for members in split_environment(dataset, env, trial)]

    @staticmethod
    def _membership(groups: list[Tensor], n_examples: int) -> Tensor:
        belongs = torch.zeros(n_examples, len(groups))
        for number, members in enumerate(groups):
            belongs[members, number] = 1.0
        return belongs

    @property
    def shape(self) -> tuple[int, int]:
        """[K, G]."""
        return self._sizes.shape

    def alone(self, predict: Predict) -> Tensor:
        """For methods whose prediction of an example depends on that example alone: any batches will do."""
        n_runs, n_groups = self.shape
        counts = torch.zeros(n_runs, self._belongs.shape[1], n_groups, device=self._belongs.device)
        for numbers, x in zip(self._chunks, self.dataset.batches(self._chunks), strict=True):
            right = (predict(x).argmax(-1) == self.dataset.labels[numbers]).to(counts.dtype)
            # Whole numbers below 2^24 add up exactly in float32, in any order.
            counts = counts + (right @ self._belongs[numbers].flatten(1)).view(counts.shape)
        return counts.gather(1, self._trial_of_run.view(-1, 1, 1).expand(-1, 1, n_groups)).squeeze(1)

    def in_context(self, predict: Predict, batch_size: int = 64) -> Tensor:
        """For methods that look at the whole batch: batches of one environment and one split, as DomainBed's."""
        columns = []
        for group in range(self.shape[1]):
            members = torch.stack([trial[group] for trial in self._members])[self._trial_of_run]  # [K, n]
            hits = [self._hits(predict, numbers) for numbers in torch.split(members, batch_size, dim=1)]
            columns.append(torch.stack(hits).sum(0))
        return torch.stack(columns, dim=1).to(torch.float32)

    def _hits(self, predict: Predict, numbers: Tensor) -> Tensor:
        right = predict(self.dataset.inputs(numbers)).argmax(-1) == self.dataset.labels[numbers]
        return right.sum(1)

    def fractions(self, counts: Tensor) -> Accuracies:
        """Accuracies from counts [..., K, G]; waits for the device."""
        fractions = counts.cpu().numpy().astype(np.float64) / np.maximum(self._sizes, 1)
        return Accuracies(fractions[..., 0::2], fractions[..., 1::2])


def evaluation_steps(steps: int, every: int) -> Iterator[int]:
    """The steps after which a run is evaluated: every so many, and the last."""
    return (step for step in range(steps) if is_evaluation_step(step, steps, every))


def is_evaluation_step(step: int, steps: int, every: int) -> bool:
    """Whether a run is evaluated after this step."""
    return step % every == 0 or step == steps - 1
