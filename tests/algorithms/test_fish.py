"""Fish against modules and one PyTorch Adam that goes on from step to step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import EnvBatch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize("meta_lr", [0.05, 0.5, 1.0])
def test_trains_like_a_loop_with_a_clone(
    meta_lr: float, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Fish", meta_lr=meta_lr)
    losses, state = train("Fish", batches, hparams)

    featurizer = problem.featurizer()
    inner = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    optimizer = torch.optim.Adam(inner.parameters(), lr=3e-3, weight_decay=1e-2)
    weights = train("Fish", [], hparams)[1]["params"]
    for step, batch in enumerate(batches):
        vector_to_parameters(weights.clone(), inner.parameters())
        seen = []
        for e in random.permutation(random.fold(random.key_of(5), step), 3).tolist():
            loss = F.cross_entropy(inner(batch.x[e]), batch.y[e])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(loss.item())
        weights = weights + meta_lr * (parameters_to_vector(inner.parameters()).detach() - weights)
        assert losses[step] == pytest.approx(sum(seen) / 3, rel=1e-9)
    torch.testing.assert_close(state["params"], weights, rtol=1e-7, atol=1e-9)
    assert state["adam"].count.item() == 3 * len(batches)


def test_the_order_of_the_environments_changes_from_step_to_step(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    algorithm, hparams = ALGORITHMS["Fish"].build(problem), hparams_of("Fish")
    start = train("Fish", [], hparams)[1]
    ends = [algorithm.step(start, batches[0], hparams, random.key_of(seed))[0]["params"] for seed in range(40)]
    assert len({tuple(end.tolist()) for end in ends}) == 6  # the orders of three environments


def test_with_a_rate_of_zero_nothing_moves_but_the_inner_adam(
    batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Fish", meta_lr=0)
    _, state = train("Fish", batches, hparams)
    assert torch.equal(state["params"], train("Fish", [], hparams)[1]["params"])
    assert state["adam"].square.any()
