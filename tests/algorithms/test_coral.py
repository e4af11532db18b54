"""CORAL against NumPy's covariance and a loop over pairs."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms.coral import feature_moments, mean_pairwise_square


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


def test_trains_like_a_loop_over_pairs(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        features = [model["featurizer"](x) for x, _ in minibatches]
        risk = sum(F.cross_entropy(model["classifier"](z), y) for z, (_, y) in zip(features, minibatches, strict=True))
        penalty = torch.zeros(())
        for a, b in combinations(features, 2):
            penalty = penalty + ((a.mean(0) - b.mean(0)) ** 2).mean()
            penalty = penalty + ((torch.cov(a.T) - torch.cov(b.T)) ** 2).mean()
        return risk / 3 + 4.0 * penalty / 3

    assert_minimizes("CORAL", hparams_of("CORAL", mmd_gamma=4), naive)
