"""The temporal AND-mask against a history of signs that is kept in full."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import Problem, State
from sandmask.functional import EnvBatch

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def test_trains_like_a_history_of_signs(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    memory, tau = 0.7, 0.4
    name = "ANDMask-temporal"
    losses, state = train(name, batches, hparams_of(name, tau=tau, sign_memory=memory))
    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    vector_to_parameters(train(name, [], hparams_of(name))[1]["params"].clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    history: list[Tensor] = []
    for step, batch in enumerate(batches):
        risks = [F.cross_entropy(model(x), y) for x, y in zip(batch.x, batch.y, strict=True)]
        gradients = [parameters_to_vector(torch.autograd.grad(risk, list(model.parameters()))) for risk in risks]
        history.append(torch.stack(gradients).sign().mean(0))
        shares = [memory ** (step - t) for t in range(step + 1)]
        agreement = torch.stack([share * signs for share, signs in zip(shares, history, strict=True)]).sum(0) / sum(
            shares
        )
        update = torch.where(agreement.abs() >= tau, torch.stack(gradients).mean(0), 0.0)
        pieces = torch.split(update, [p.numel() for p in model.parameters()])
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
        assert losses[step] == pytest.approx(torch.stack(risks).mean().item(), rel=1e-9)
    torch.testing.assert_close(state["params"], parameters_to_vector(model.parameters()).detach(), rtol=1e-7, atol=1e-9)


def test_without_a_memory_it_is_the_and_mask(batches: list[EnvBatch], hparams_of: MakeHparams, train: Train) -> None:
    hparams = hparams_of("ANDMask-temporal", tau=0.5, sign_memory=0.0)
    one, other = (train(name, batches, hparams)[1]["params"] for name in ("ANDMask-temporal", "ANDMask"))
    assert torch.equal(one, other)


def test_what_always_agrees_passes_the_strictest_threshold(
    problem: Problem, hparams_of: MakeHparams, train: Train
) -> None:
    """In float32 too, where 1 - b^t is not what a moving average of ones is."""
    from sandmask.algorithms import ALGORITHMS
    from sandmask.masks import TensorMoments

    algorithm = ALGORITHMS["ANDMask-temporal"].build(problem)
    hparams = {name: value.float() for name, value in hparams_of("ANDMask-temporal", tau=1.0, sign_memory=0.99).items()}
    state = algorithm.init(0)
    ones = torch.ones(algorithm.network.numel)
    for _ in range(50):
        _, changes, metrics = algorithm.masked(state, TensorMoments(3, 3 * ones, ones, 0 * ones), hparams)  # type: ignore[attr-defined]
        state = {**state, **changes}
        assert metrics["mask_density"] == 1
