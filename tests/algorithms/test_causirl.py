"""CausIRL against slices, PyTorch's covariance and loops over examples."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms.causirl import random_part
from sandmask.functional import EnvBatch, make_batch, random

MakeHparams = Callable[..., dict[str, Tensor]]


def coral(p: Tensor, q: Tensor) -> Tensor:
    means = ((p.mean(0) - q.mean(0)) ** 2).mean()
    return means + ((torch.cov(p.T) - torch.cov(q.T)) ** 2).mean()


def kernel_mean(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=a.dtype)
    for x in a:
        for power in range(-3, 4):
            total = total + torch.exp(-(10.0**power) * ((b - x) ** 2).sum(1)).sum()
    return total / (len(a) * len(b))


def mmd(p: Tensor, q: Tensor) -> Tensor:
    return kernel_mean(p, p) + kernel_mean(q, q) - 2 * kernel_mean(p, q)


@pytest.mark.parametrize(("name", "distance"), [("CausIRL_CORAL", coral), ("CausIRL_MMD", mmd)])
def test_trains_like_slices(
    name: str,
    distance: Callable[[Tensor, Tensor], Tensor],
    hparams_of: MakeHparams,
    assert_minimizes: Callable[..., None],
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        cuts = random.integers(random.fold(random.key_of(5), step), 7, 3).tolist()
        features = [model["featurizer"](x) for x, _ in minibatches]
        risk = sum(F.cross_entropy(model["classifier"](z), y) for z, (_, y) in zip(features, minibatches, strict=True))
        p = torch.cat([z[:cut] for z, cut in zip(features, cuts, strict=True)])
        q = torch.cat([z[cut:] for z, cut in zip(features, cuts, strict=True)])
        return risk / 3 + 4.0 * distance(p, q)

    assert_minimizes(name, hparams_of(name, mmd_gamma=4), naive)


def test_every_cut_is_drawn_and_padding_is_in_no_part() -> None:
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    batch = make_batch(torch.zeros(2, 4, 1), torch.zeros(2, 4, dtype=torch.int64), random.key_of(0), weight)
    parts = torch.stack([random_part(batch, random.key_of(seed)) for seed in range(100)])
    assert {tuple(row) for row in parts[:, 0].tolist()} == {(0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)}
    assert {tuple(row) for row in parts[:, 1].tolist()} == {(0, 0, 0, 0), (0, 1, 0, 0)}


@pytest.mark.parametrize("name", ["CausIRL_CORAL", "CausIRL_MMD"])
def test_too_small_a_part_has_no_penalty(
    name: str,
    problem: Problem,
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    """One environment of one or two examples never has two in both parts."""
    alone = Problem(problem.featurizer, 1, problem.n_classes, problem.input_shape)
    for n in (1, 2):
        few = [EnvBatch(*(field[:1, :n] for field in batch)) for batch in batches]
        losses, state = train(name, few, hparams_of(name, mmd_gamma=9), problem=alone)
        expected, erm = train("ERM", few, hparams_of("ERM"), problem=alone)
        assert losses == pytest.approx(expected)
        torch.testing.assert_close(state["params"], erm["params"])
    assert name in ALGORITHMS
