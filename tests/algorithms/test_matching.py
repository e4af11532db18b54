"""CORAL, MMD and CausIRL against NumPy's and PyTorch's covariances, slices, and loops over pairs and examples."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms.causirl import random_part
from sandmask.algorithms.coral import feature_moments, mean_pairwise_square
from sandmask.algorithms.mmd import MMD, discrepancy
from sandmask.functional import EnvBatch, make_batch, random

MakeHparams = Callable[..., dict[str, Tensor]]


def test_moments_are_numpys_whatever_the_padding() -> None:
    features = 2 * torch.randn(3, 9, 4) + 1
    weight = torch.zeros(3, 9)
    for e, count in enumerate((9, 6, 2)):
        weight[e, :count] = 1
    means, covariances = feature_moments(features, weight)
    for e, count in enumerate((9, 6, 2)):
        true = features[e, :count].numpy()
        np.testing.assert_allclose(means[e].numpy(), true.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(covariances[e].numpy(), np.cov(true, rowvar=False), rtol=1e-4, atol=1e-5)


def test_one_example_has_no_covariance() -> None:
    _, covariances = feature_moments(torch.randn(2, 1, 3), torch.ones(2, 1))
    assert not covariances.any()


@pytest.mark.parametrize("n_envs", [2, 3, 5])
def test_the_mean_over_pairs_needs_no_pairs(n_envs: int) -> None:
    values = torch.randn(n_envs, 3, 4)
    expected = np.mean([((a - b) ** 2).mean().item() for a, b in combinations(values, 2)])
    assert mean_pairwise_square(values).item() == pytest.approx(expected, rel=1e-5)


def test_one_environment_has_no_pairs() -> None:
    assert mean_pairwise_square(torch.randn(1, 3, 4)).item() == 0.0


def test_coral_trains_like_a_loop_over_pairs(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        features = [model["featurizer"](x) for x, _ in minibatches]
        risk = sum(F.cross_entropy(model["classifier"](z), y) for z, (_, y) in zip(features, minibatches, strict=True))
        penalty = torch.zeros(())
        for a, b in combinations(features, 2):
            penalty = penalty + ((a.mean(0) - b.mean(0)) ** 2).mean()
            penalty = penalty + ((torch.cov(a.T) - torch.cov(b.T)) ** 2).mean()
        return risk / 3 + 4.0 * penalty / 3

    assert_minimizes("CORAL", hparams_of("CORAL", mmd_gamma=4), naive)


def naive_kernel_mean(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=a.dtype)
    for x in a:
        for power in range(-3, 4):
            total = total + torch.exp(-(10.0**power) * ((b - x) ** 2).sum(1)).sum()
    return total / (len(a) * len(b))


def naive_discrepancy(features: list[Tensor]) -> Tensor:
    pairs = [
        naive_kernel_mean(a, a) + naive_kernel_mean(b, b) - 2 * naive_kernel_mean(a, b)
        for a, b in combinations(features, 2)
    ]
    return torch.stack(pairs).mean()


@pytest.mark.parametrize(("n_envs", "offset", "spread"), [(2, 0.0, 1.0), (3, 5.0, 0.3), (4, -2.0, 0.02)])
def test_the_discrepancy_and_its_gradient_are_those_of_the_loops(n_envs: int, offset: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(n_envs)
    features = offset + spread * torch.randn(n_envs, 5, 3, generator=generator)
    features[0, 1] = features[0, 0]  # drawn twice, as sampling with replacement does
    value, gradient = discrepancy(features, torch.ones(n_envs, 5))
    exact = features.double().requires_grad_()
    expected = naive_discrepancy(list(exact))
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    assert value.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    scale = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-3, atol=5e-4 * scale)


def test_padding_has_no_part_in_the_discrepancy() -> None:
    features = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(3, 8)
    weight[:, 5:], features[:, 5:] = 0, 100
    value, gradient = discrepancy(features, weight)
    expected, expected_gradient = discrepancy(features[:, :5], weight[:, :5])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[:, :5], expected_gradient, rtol=1e-4, atol=1e-6)
    assert not gradient[:, 5:].any()


def test_equal_environments_have_no_discrepancy_and_one_environment_neither() -> None:
    features = torch.randn(1, 6, 3)
    assert discrepancy(features, torch.ones(1, 6))[0].item() == 0.0
    value, gradient = discrepancy(features.expand(3, 6, 3), torch.ones(3, 6))
    assert value.item() == pytest.approx(0.0, abs=1e-5)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)


def test_the_attached_gradient_reaches_what_made_the_features(problem: object) -> None:
    scale = torch.tensor(0.7, requires_grad=True)
    base = torch.randn(2, 5, 3)
    key = random.key_of(0)
    batch = make_batch(base, torch.zeros(2, 5, dtype=torch.int64), key)
    distance = MMD(problem).distance(scale * base, batch, key)  # type: ignore[arg-type]
    expected = naive_discrepancy(list(scale * base))
    torch.testing.assert_close(distance, expected)
    (ours,) = torch.autograd.grad(distance, scale)
    (theirs,) = torch.autograd.grad(expected, scale)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_mmd_trains_like_the_loops(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        features = [model["featurizer"](x) for x, _ in minibatches]
        risk = sum(F.cross_entropy(model["classifier"](z), y) for z, (_, y) in zip(features, minibatches, strict=True))
        return risk / 3 + 2.0 * naive_discrepancy(features)

    assert_minimizes("MMD", hparams_of("MMD", mmd_gamma=2), naive)


def coral(p: Tensor, q: Tensor) -> Tensor:
    means = ((p.mean(0) - q.mean(0)) ** 2).mean()
    return means + ((torch.cov(p.T) - torch.cov(q.T)) ** 2).mean()


def mmd(p: Tensor, q: Tensor) -> Tensor:
    return naive_discrepancy([p, q])


@pytest.mark.parametrize(("name", "distance"), [("CausIRL_CORAL", coral), ("CausIRL_MMD", mmd)])
def test_causirl_trains_like_slices(
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
