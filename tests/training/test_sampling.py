import hashlib
from collections.abc import Callable

import numpy as np
import torch

from sandmask.datasets import Dataset
from sandmask.functional import random
from sandmask.records import RunSpec
from sandmask.training.sampling import Sampler, split_environment


def domainbed_split(n: int, trial_seed: int, env: int) -> tuple[list[int], list[int]]:
    """The split as PROTOCOL describes it, spelled out."""
    seed = int(hashlib.md5(str((trial_seed, env)).encode()).hexdigest(), 16) % 2**31
    keys = list(range(n))
    np.random.RandomState(seed).shuffle(keys)
    return keys[int(n * 0.2) :], keys[: int(n * 0.2)]


def test_split_is_domainbeds(dataset: Dataset) -> None:
    for env in range(3):
        inside, outside = split_environment(dataset, env, trial_seed=2)
        start = dataset.bounds[env]
        expected = domainbed_split(dataset.bounds[env + 1] - start, 2, env)
        assert (inside - start).tolist() == expected[0]
        assert (outside - start).tolist() == expected[1]


def test_batches_come_from_the_training_environments_in_split(
    dataset: Dataset, spec_of: Callable[..., RunSpec], device: torch.device
) -> None:
    specs = [spec_of(test_envs=(1,), seed=seed) for seed in range(3)]
    sampler = Sampler(dataset, specs, batch_size=200, device=device)
    numbers = sampler(random.keys(random.key_of(0), 3))
    assert numbers.shape == (3, 2, 200)
    for place, env in enumerate((0, 2)):
        allowed = set(split_environment(dataset, env, trial_seed=0)[0].tolist())
        drawn = numbers[:, place]
        assert set(drawn.flatten().tolist()) == allowed  # 600 draws of about 51: all of them, nothing else
        assert len(set(drawn[0].tolist())) < 200  # with replacement


def test_a_run_draws_the_same_alone_and_among_others(
    dataset: Dataset, spec_of: Callable[..., RunSpec], device: torch.device
) -> None:
    specs = [spec_of(test_envs=(env,), trial_seed=env) for env in range(3)]
    keys = random.keys(random.key_of(5), 3)
    together = Sampler(dataset, specs, 8, device)(keys)
    wider = Sampler(dataset, specs, 20, device)(keys)
    for k, spec in enumerate(specs):
        alone = Sampler(dataset, [spec], 8, device)(keys[k : k + 1])
        assert torch.equal(alone[0], together[k])
        assert torch.equal(alone[0], wider[k, :, :8])  # a padded batch begins with the true one
