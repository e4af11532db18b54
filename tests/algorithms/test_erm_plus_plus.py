"""ERM++'s warm start against two of PyTorch's optimizers."""

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


@pytest.mark.parametrize("linear_steps", [0, 3, 9])
def test_trains_the_classifier_first(
    linear_steps: int, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("ERMPlusPlus", linear_steps=linear_steps, linear_lr=7e-3)
    losses, state = train("ERMPlusPlus", batches, hparams)

    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    start: Tensor = train("ERMPlusPlus", [], hparams)[1]["params"]
    vector_to_parameters(start.clone(), model.parameters())
    everything = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    head = torch.optim.Adam(model[1].parameters(), lr=7e-3, weight_decay=1e-2)
    for step, batch in enumerate(batches):
        loss = torch.stack([F.cross_entropy(model(x), y) for x, y in zip(batch.x, batch.y, strict=True)]).mean()
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        (head if step < linear_steps else everything).step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)
