"""GroupDRO against its algorithm 1, written out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import State
from sandmask.functional import EnvBatch


def test_trains_like_algorithm_1(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None]
) -> None:
    q = [1.0, 1.0, 1.0]

    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        total = torch.zeros(())
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        for e, risk in enumerate(risks):
            q[e] *= math.exp(0.5 * risk.item())
        q[:] = [weight / sum(q) for weight in q]
        for weight, risk in zip(q, risks, strict=True):
            total = total + weight * risk
        return total

    assert_minimizes("GroupDRO", hparams_of("GroupDRO", groupdro_eta=0.5), naive)


def test_the_weights_are_kept_and_grow_where_the_risk_is_largest(
    batches: list[EnvBatch],
    hparams_of: Callable[..., dict[str, Tensor]],
    train: Callable[..., tuple[list[float], State]],
) -> None:
    hparams = hparams_of("GroupDRO", groupdro_eta=0.1, lr=0)
    risks = [train("ERM", [batches[0].environment(e)], hparams_of("ERM"))[0][0] for e in range(3)]
    _, state = train("GroupDRO", [batches[0]] * 4, hparams)
    expected = torch.softmax(4 * 0.1 * torch.tensor(risks, dtype=torch.float64), 0)
    torch.testing.assert_close(state["q"], expected)


def test_a_huge_risk_gives_a_weight_of_one_rather_than_nan(
    batches: list[EnvBatch],
    hparams_of: Callable[..., dict[str, Tensor]],
    train: Callable[..., tuple[list[float], State]],
) -> None:
    batch = batches[0]._replace(x=batches[0].x * torch.tensor([1.0, 1.0, 1e7]).view(-1, 1, 1))
    hparams = hparams_of("GroupDRO", groupdro_eta=0.1)
    losses, state = train("GroupDRO", [batch], hparams)
    assert state["q"].tolist() == pytest.approx([0, 0, 1])
    assert math.isfinite(losses[0])
