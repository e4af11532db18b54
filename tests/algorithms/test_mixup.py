"""Mixup against a loop over pairs of environments."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms.mixup import mix
from sandmask.functional import EnvBatch, random


def test_trains_like_a_loop_over_the_pairs(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        key = random.fold(random.key_of(5), step)
        order = random.permutation(random.fold(key, 0), 3).tolist()
        shares = random.symmetric_beta(random.fold(key, 1), torch.tensor(0.7, dtype=torch.float64), 3)
        total = torch.zeros(())
        for place, (lam, rest) in enumerate(zip(shares.tolist(), (1 - shares).tolist(), strict=True)):
            x_i, y_i = minibatches[order[place]]
            x_j, y_j = minibatches[order[(place + 1) % 3]]
            logits = model["classifier"](model["featurizer"](lam * x_i + rest * x_j))
            total = total + lam * F.cross_entropy(logits, y_i) + rest * F.cross_entropy(logits, y_j)
        return total / 3

    assert_minimizes("Mixup", hparams_of("Mixup", mixup_alpha=0.7), naive)


def test_every_environment_is_once_first_and_once_second(batches: list[EnvBatch]) -> None:
    batch = batches[0]
    for seed in range(5):
        order = random.permutation(random.key_of(seed), 3)
        own, _ = mix(batch, order, torch.ones(3))
        other, other_y = mix(batch, order, torch.zeros(3))
        for e in range(3):
            first, second = int(order[e]), int(order[(e + 1) % 3])
            assert torch.equal(own.x[e], batch.x[first])
            assert torch.equal(own.y[e], batch.y[first])
            assert torch.equal(other.x[e], batch.x[second])
            assert torch.equal(other_y[e], batch.y[second])


def test_a_pair_with_padding_is_padding(batches: list[EnvBatch]) -> None:
    weight = torch.ones(3, 7)
    weight[1, 5:] = 0
    mixed, _ = mix(batches[0]._replace(weight=weight), torch.tensor([0, 1, 2]), torch.full((3,), 0.5))
    assert mixed.weight.sum(-1).tolist() == [5, 5, 7]
