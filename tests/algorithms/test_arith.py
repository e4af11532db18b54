"""Arith against a module that plain SGD moves through the environments."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import Problem, State
from sandmask.functional import EnvBatch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def test_trains_like_a_copy_that_sgd_moves(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Arith", arith_lr=0.2)
    losses, state = train("Arith", batches, hparams)

    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    start: Tensor = train("Arith", [], hparams)[1]["params"]
    vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for step, batch in enumerate(batches):
        inner = copy.deepcopy(model)
        sgd = torch.optim.SGD(inner.parameters(), lr=0.2)
        optimizer.zero_grad()
        seen = []
        order = random.permutation(random.fold(random.key_of(5), step), 3).tolist()
        for weight, e in zip((1.5, 1.0, 0.5), order, strict=True):
            loss = F.cross_entropy(inner(batch.x[e]), batch.y[e])
            sgd.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for outer, moved in zip(model.parameters(), inner.parameters(), strict=True):
                assert moved.grad is not None
                share = weight * moved.grad / 3
                outer.grad = share if outer.grad is None else outer.grad + share
            sgd.step()
            seen.append(loss.item())
        optimizer.step()
        assert losses[step] == pytest.approx(sum(seen) / 3, rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)
