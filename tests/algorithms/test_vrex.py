"""V-REx against a naive variance of risks."""

from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import State
from sandmask.functional import EnvBatch


def test_trains_like_the_naive_objective_through_the_jump_of_the_weight(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        mean = (risks[0] + risks[1] + risks[2]) / 3
        variance = ((risks[0] - mean) ** 2 + (risks[1] - mean) ** 2 + (risks[2] - mean) ** 2) / 3
        return mean + (1.0 if step < 2 else 20.0) * variance

    hparams = hparams_of("VREx", vrex_lambda=20, vrex_penalty_anneal_iters=2)
    assert_minimizes("VREx", hparams, naive, reset_at=2)


def test_the_variance_is_numpys_population_variance(
    batches: list[EnvBatch],
    hparams_of: Callable[..., dict[str, Tensor]],
    train: Callable[..., tuple[list[float], State]],
) -> None:
    losses = {
        weight: train("VREx", batches[:1], hparams_of("VREx", vrex_lambda=weight, vrex_penalty_anneal_iters=0))[0][0]
        for weight in (0, 1)
    }
    risks = [train("ERM", [batches[0].environment(e)], hparams_of("ERM"))[0][0] for e in range(3)]
    assert losses[0] == pytest.approx(np.mean(risks), rel=1e-5)
    assert losses[1] - losses[0] == pytest.approx(np.var(risks), rel=1e-3)
    assert np.var(risks) > 1e-4
