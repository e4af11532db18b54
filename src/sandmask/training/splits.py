"""Which examples of an environment are trained on ("in") and which are held back for selection ("out")."""

import numpy as np
import torch
from torch import Tensor

from sandmask.datasets import Dataset
from sandmask.hparams import seed_hash

HOLDOUT_FRACTION = 0.2


def split_environment(dataset: Dataset, env: int, trial_seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the "in" (80%) and of the "out" (20%) examples of an environment, as DomainBed splits them."""
    start, stop = dataset.bounds[env], dataset.bounds[env + 1]
    order = np.arange(stop - start)
    np.random.RandomState(seed_hash(trial_seed, env)).shuffle(order)
    n_out = int(HOLDOUT_FRACTION * len(order))
    numbers = torch.from_numpy(order + start)
    return numbers[n_out:], numbers[:n_out]
