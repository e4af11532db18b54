"""Agr-Sum, Agr-Rand, PCGrad and GGA-L against loops over the environments' gradients."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import Problem, State
from sandmask.algorithms.gga_l import mean_cosine
from sandmask.algorithms.pcgrad import projections
from sandmask.functional import EnvBatch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def agr_sum(gradients: list[Tensor], key: Tensor) -> Tensor:
    total = torch.zeros_like(gradients[0])
    for j in range(len(total)):
        values = [gradient[j].item() for gradient in gradients]
        if all(value > 0 for value in values) or all(value < 0 for value in values):
            total[j] = sum(values)
    return total


def agr_rand(gradients: list[Tensor], key: Tensor) -> Tensor:
    total = agr_sum(gradients, key)
    size = total[total != 0].abs().mean()
    return torch.where(total != 0, total, size * random.normal(key, len(total)))


def pcgrad(gradients: list[Tensor], key: Tensor) -> Tensor:
    order = random.permutation(key, len(gradients)).tolist()
    projected = []
    for e, gradient in enumerate(gradients):
        own = gradient.clone()
        for i in order:
            if i != e and own.dot(gradients[i]) < 0:
                own = own - own.dot(gradients[i]) / gradients[i].dot(gradients[i]) * gradients[i]
        projected.append(own)
    return torch.stack(projected).mean(0)


def gga_l(gradients: list[Tensor], key: Tensor) -> Tensor:
    cosines = [F.cosine_similarity(a, b, dim=0) for a, b in combinations(gradients, 2)]
    noise = random.uniform(key, len(gradients[0]))
    return torch.stack(gradients).mean(0) + 0.1 * (1 - torch.stack(cosines).mean()) * noise


RULES = {"AgrSum": agr_sum, "AgrRand": agr_rand, "PCGrad": pcgrad, "GGA_L": gga_l}


@pytest.mark.parametrize("name", RULES)
def test_trains_like_a_loop_over_gradients(
    name: str, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of(name, **({"gga_gamma": 0.1} if name == "GGA_L" else {}))
    losses, state = train(name, batches, hparams)

    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    start: Tensor = train(name, [], hparams)[1]["params"]
    vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for step, batch in enumerate(batches):
        risks = [F.cross_entropy(model(x), y) for x, y in zip(batch.x, batch.y, strict=True)]
        gradients = [parameters_to_vector(torch.autograd.grad(risk, list(model.parameters()))) for risk in risks]
        update = RULES[name](gradients, random.fold(random.key_of(5), step))
        for p, piece in zip(
            model.parameters(), torch.split(update, [p.numel() for p in model.parameters()]), strict=True
        ):
            p.grad = piece.view_as(p)
        optimizer.step()
        assert losses[step] == pytest.approx(torch.stack(risks).mean().item(), rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-6, atol=1e-8)


def test_projected_gradients_conflict_no_more_with_the_last_one() -> None:
    gradients = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    projected = projections(gradients @ gradients.T, order) @ gradients
    assert ((gradients @ gradients.T) < -0.1).any()
    assert ((projected[[0, 2, 3]] @ gradients[1]) > -1e-12).all()


def test_a_gradient_of_zero_conflicts_with_nothing() -> None:
    gradients = torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, 1.0]])
    rows = projections(gradients @ gradients.T, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(rows, torch.eye(3))
    assert mean_cosine(gradients).isfinite()
