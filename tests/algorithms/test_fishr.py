"""Fishr against the gradient of every example, by autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import State
from sandmask.functional import EnvBatch

MakeHparams = Callable[..., dict[str, Tensor]]


def naive_variance(model: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    """The biased variance of the examples' gradients by weight and bias of the classifier, as one vector."""
    z, head = model["featurizer"](x), list(model["classifier"].parameters())
    gradients = []
    for i in range(len(x)):
        loss = F.cross_entropy(model["classifier"](z[i : i + 1]), y[i : i + 1])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, head, create_graph=True)]))
    return torch.stack(gradients).var(dim=0, correction=0)


def test_trains_like_a_loop_over_examples(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    ema, averages = 0.9, [torch.zeros(()) for _ in range(3)]

    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        smooth = []
        for e, (x, y) in enumerate(minibatches):
            average = ema * averages[e] + (1 - ema) * naive_variance(model, x, y)
            averages[e] = average.detach()
            smooth.append(average / (1 - ema))
        mean = (smooth[0] + smooth[1] + smooth[2]) / 3
        penalty = torch.stack([((variance - mean) ** 2).mean() for variance in smooth]).sum()
        return torch.stack(risks).mean() + (500.0 if step >= 2 else 0.0) * penalty / 3

    hparams = hparams_of("Fishr", **{"lambda": 500, "penalty_anneal_iters": 2, "ema": ema})
    assert_minimizes("Fishr", hparams, naive, reset_at=2)


@pytest.mark.parametrize("weight", [0.0, 100.0])
def test_the_averages_are_kept_from_the_first_step_on(
    weight: float,
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    hparams = hparams_of("Fishr", **{"lambda": weight, "penalty_anneal_iters": 9})
    _, state = train("Fishr", batches[:1], hparams)
    assert (state["variances"] > 0).all()
