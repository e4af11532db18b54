"""MMD against loops over examples and autograd."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms.mmd import MMD, discrepancy
from sandmask.functional import make_batch, random


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
def test_value_and_gradient_are_those_of_the_loops(n_envs: int, offset: float, spread: float) -> None:
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


def test_padding_has_no_part() -> None:
    features = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(3, 8)
    weight[:, 5:], features[:, 5:] = 0, 100
    value, gradient = discrepancy(features, weight)
    expected, expected_gradient = discrepancy(features[:, :5], weight[:, :5])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[:, :5], expected_gradient, rtol=1e-4, atol=1e-6)
    assert not gradient[:, 5:].any()


def test_equal_environments_have_none_and_one_environment_too() -> None:
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


def test_trains_like_the_loops(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        features = [model["featurizer"](x) for x, _ in minibatches]
        risk = sum(F.cross_entropy(model["classifier"](z), y) for z, (_, y) in zip(features, minibatches, strict=True))
        return risk / 3 + 2.0 * naive_discrepancy(features)

    assert_minimizes("MMD", hparams_of("MMD", mmd_gamma=2), naive)
