"""Splits and minibatches, as functions of seeds and keys."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sandmask.datasets import Dataset
from sandmask.functional import random
from sandmask.hparams import seed_hash
from sandmask.records import RunSpec

HOLDOUT_FRACTION = 0.2


def holdout_fraction(spec: RunSpec) -> float:
    """The fraction of each environment's examples that a run holds back for selection."""
    return float(spec.hparams.get("holdout_fraction", HOLDOUT_FRACTION))


def split_environment(
    dataset: Dataset, env: int, trial_seed: int, fraction: float = HOLDOUT_FRACTION
) -> tuple[Tensor, Tensor]:
    """Return the indices of the "in" (80%) and "out" (20%) examples of an environment, as DomainBed splits them.

    If the dataset has its own splits, they are used for every seed.

    :param dataset: the dataset.
    :param env: index of the environment.
    :param trial_seed: number of the repetition.
    :param fraction: the fraction of "out" examples.
    """
    start, stop = dataset.bounds[env], dataset.bounds[env + 1]
    if dataset.splits is not None and int(dataset.splits[start]) >= 0:
        is_out = dataset.splits[start:stop].cpu() == 1
        return torch.nonzero(~is_out)[:, 0] + start, torch.nonzero(is_out)[:, 0] + start
    order = np.arange(stop - start)
    np.random.RandomState(seed_hash(trial_seed, env)).shuffle(order)
    n_out = int(fraction * len(order))
    indices = torch.from_numpy(order + start)
    return indices[n_out:], indices[:n_out]


def training_splits(dataset: Dataset, spec: RunSpec) -> list[tuple[Tensor, Tensor]]:
    """The "in" and "out" examples of each training environment of a run."""
    envs = (env for env in range(len(dataset.environments)) if env not in spec.test_envs)
    return [split_environment(dataset, env, spec.trial_seed, holdout_fraction(spec)) for env in envs]


class Sampler:
    """Draws, for each of K runs, `batch_size` examples with replacement from each training environment.

    Runs with `class_balanced` first draw a class, and then one of its examples. Runs with `full_data` also draw the
    examples that other runs hold back for selection.
    """

    def __init__(self, dataset: Dataset, specs: Sequence[RunSpec], batch_size: int, device: torch.device) -> None:
        pools = []
        for spec in specs:
            with_out = spec.hparams.get("full_data", 0) > 0
            splits = training_splits(dataset, spec)
            pools.append([torch.cat(split) if with_out else split[0] for split in splits])
        self.batch_size = batch_size
        self.n_envs = len(pools[0])
        self.sizes = torch.tensor([[len(pool) for pool in run] for run in pools], device=device)  # [K, E]
        self._classes: _Classes | None = None
        if specs[0].hparams.get("class_balanced", 0) > 0:
            labels = dataset.labels.cpu()
            pools = [[pool[labels[pool].argsort(stable=True)] for pool in run] for run in pools]
            counts = [[torch.bincount(labels[pool], minlength=len(dataset.classes)) for pool in run] for run in pools]
            self._classes = _Classes.of(torch.stack([torch.stack(run) for run in counts]).to(device))
        longest = int(self.sizes.max())
        padded = [[torch.nn.functional.pad(pool, (0, longest - len(pool))) for pool in run] for run in pools]
        self.indices = torch.stack([torch.stack(run) for run in padded]).to(device)  # [K, E, longest]

    def to(self, device: torch.device) -> "Sampler":
        """A copy of this sampler for keys on `device`."""
        moved = copy.copy(self)
        moved.sizes, moved.indices = self.sizes.to(device), self.indices.to(device)
        if self._classes is not None:
            moved._classes = _Classes(*(field.to(device) for field in self._classes))  # noqa: SLF001 - the same class
        return moved

    def __call__(self, keys: Tensor) -> Tensor:
        """Indices of examples [..., K, E, B] for keys [..., K]."""
        shape = (self.n_envs, self.batch_size)
        if self._classes is None:
            places = random.integers(keys, self.sizes.unsqueeze(-1), *shape)
        else:
            places = self._classes.places(keys, *shape)
        return self.indices.expand(*keys.shape, -1, -1).gather(-1, places)


class _Classes(NamedTuple):
    """The positions of classes in pools that are sorted by class. Classes without examples come last."""

    starts: Tensor  # [K, E, C]
    counts: Tensor  # [K, E, C]
    present: Tensor  # [K, E, 1]: number of classes with examples

    @classmethod
    def of(cls, counts: Tensor) -> "_Classes":
        order = (counts == 0).to(torch.int8).argsort(dim=-1, stable=True)
        starts = counts.cumsum(-1) - counts
        return cls(starts.gather(-1, order), counts.gather(-1, order), (counts > 0).sum(-1, keepdim=True))

    def places(self, keys: Tensor, n_envs: int, batch_size: int) -> Tensor:
        """Draw classes of the pools, then one example of each. Return indices into the pools, [..., K, E, B]."""
        chosen = random.integers(random.fold(keys, 0), self.present, n_envs, batch_size)
        starts, counts = (each.expand(*keys.shape, -1, -1).gather(-1, chosen) for each in (self.starts, self.counts))
        return starts + random.integers(random.fold(keys, 1), counts, n_envs, batch_size)
