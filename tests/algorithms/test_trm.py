"""TRM against loops over environments and autograd's Hessian."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn import functional as F

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms.trm import Examples, Heads, inverse_hessian
from sandmask.functional import EnvBatch

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def naive_inverse(matrix: Tensor, vector: Tensor) -> Tensor:
    """The series of eleven terms, cut off once its sum is large."""
    term, total = vector, vector
    for _ in range(10):
        term = term - matrix @ term
        total = total + term
        if total.abs().max() > 10:
            break
    return total


@pytest.mark.parametrize("start", [0, 2])
def test_trains_like_loops(
    start: int, problem: Problem, hparams_of: MakeHparams, assert_minimizes: Callable[..., None]
) -> None:
    first = ALGORITHMS["TRM"].build(problem).init(5)
    heads = [(first["head_weights"][e].double(), first["head_biases"][e].double()) for e in range(3)]
    alpha = [[0.0 if i == q else 1.0 for i in range(3)] for q in range(3)]

    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        z = [model["featurizer"](x) for x, _ in minibatches]
        y = [y for _, y in minibatches]
        risk = sum(F.cross_entropy(model["classifier"](z[e]), y[e]) for e in range(3)) / 3
        assert isinstance(risk, Tensor)
        if step < start:
            return risk
        penalty = torch.zeros(())
        for q in range(3):
            alpha[q] = [share / sum(alpha[q]) for share in alpha[q]]
            weight, bias = (part.clone().requires_grad_() for part in heads[q])
            sgd = torch.optim.SGD([weight, bias], lr=0.1)
            for _ in range(30):
                sgd.zero_grad()
                F.cross_entropy(F.linear(z[q].detach(), weight, bias), y[q]).backward()  # type: ignore[no-untyped-call]
                sgd.step()
            heads[q] = (weight.detach(), bias.detach())
            others = [F.cross_entropy(F.linear(z[i], weight, bias.detach()), y[i]) for i in range(3)]
            transfer = torch.stack([alpha[q][i] * others[i] for i in range(3)]).sum()
            (pull,) = torch.autograd.grad(transfer, weight, retain_graph=True)
            (own,) = torch.autograd.grad(others[q], weight, create_graph=True)

            def of_weight(flat: Tensor, q: int = q, bias: Tensor = bias) -> Tensor:
                return F.cross_entropy(F.linear(z[q].detach(), flat.view(4, 6), bias.detach()), y[q])

            along = naive_inverse(hessian(of_weight, weight.detach().flatten()), pull.flatten())  # type: ignore[no-untyped-call]
            penalty = penalty + transfer - 0.3 * along.detach().dot(own.flatten())
            factors = [torch.exp(0.5 * alpha[q][i] * others[i].detach()).item() for i in range(3)]
            alpha[q] = [share * factor for share, factor in zip(alpha[q], factors, strict=True)]
        return risk + penalty / 3

    assert_minimizes("TRM", hparams_of("TRM", cos_lambda=0.3, iters=start, groupdro_eta=0.5), naive)


def test_the_series_is_cut_off_once_it_is_large(batches: list[EnvBatch]) -> None:
    features = 30 * batches[0].x[..., :2]
    examples = Examples.of(features, batches[0], 4)
    heads = Heads(torch.zeros(3, 4, 2, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64))
    vectors = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for q, found in enumerate(inverse_hessian(examples, heads, vectors)):

        def of_weight(flat: Tensor, q: int = q) -> Tensor:
            return F.cross_entropy(features[q] @ flat.view(4, 2).T, batches[0].y[q])

        matrix = hessian(of_weight, torch.zeros(8, dtype=torch.float64))  # type: ignore[no-untyped-call]
        expected = naive_inverse(matrix, vectors[q].flatten())
        assert expected.abs().max() > 10
        torch.testing.assert_close(found.flatten(), expected)


def test_huge_risks_do_not_overflow(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    """A classifier's risk in another environment may be in the thousands, and exp of it infinite."""
    large = [batch._replace(x=1e4 * batch.x) for batch in batches]
    losses, state = train("TRM", large, hparams_of("TRM", iters=0, groupdro_eta=0.1))
    assert max(losses) > 1e3
    assert all(math.isfinite(loss) for loss in losses)
    assert state["params"].isfinite().all()
    assert (state["alpha"] <= 1).all()
