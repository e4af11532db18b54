"""Splits and minibatches, as functions of seeds and keys."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sandmask.datasets import Dataset
from sandmask.functional import random
from sandmask.hparams import seed_hash
from sandmask.records import RunSpec

HOLDOUT_FRACTION = 0.2


def split_environment(dataset: Dataset, env: int, trial_seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the "in" (80%) and "out" (20%) examples of an environment, as DomainBed splits them.

    A dataset that says how it is split is split that way, whatever the seed.

    :param dataset: the dataset.
    :param env: index of the environment.
    :param trial_seed: number of the repetition.
    """
    start, stop = dataset.bounds[env], dataset.bounds[env + 1]
    if dataset.splits is not None and int(dataset.splits[start]) >= 0:
        is_out = dataset.splits[start:stop].cpu() == 1
        return torch.nonzero(~is_out)[:, 0] + start, torch.nonzero(is_out)[:, 0] + start
    order = np.arange(stop - start)
    np.random.RandomState(seed_hash(trial_seed, env)).shuffle(order)
    n_out = int(HOLDOUT_FRACTION * len(order))
    indices = torch.from_numpy(order + start)
    return indices[n_out:], indices[:n_out]


class Sampler:
    """Draws, for each of K runs, `batch_size` examples with replacement from each training environment."""

    def __init__(self, dataset: Dataset, specs: Sequence[RunSpec], batch_size: int, device: torch.device) -> None:
        pools = [self._pools(dataset, spec) for spec in specs]
        self.batch_size = batch_size
        self.n_envs = len(pools[0])
        self.sizes = torch.tensor([[len(pool) for pool in run] for run in pools], device=device)  # [K, E]
        longest = int(self.sizes.max())
        padded = [[torch.nn.functional.pad(pool, (0, longest - len(pool))) for pool in run] for run in pools]
        self.indices = torch.stack([torch.stack(run) for run in padded]).to(device)  # [K, E, longest]

    @staticmethod
    def _pools(dataset: Dataset, spec: RunSpec) -> list[Tensor]:
        envs = (env for env in range(len(dataset.environments)) if env not in spec.test_envs)
        return [split_environment(dataset, env, spec.trial_seed)[0] for env in envs]

    def __call__(self, keys: Tensor) -> Tensor:
        """Indices of examples [..., K, E, B] for keys [..., K]."""
        places = random.integers(keys, self.sizes.unsqueeze(-1), self.n_envs, self.batch_size)
        return self.indices.expand(*keys.shape, -1, -1).gather(-1, places)
