"""SAM, GSAM and SAGM against modules that are moved, and moved back."""

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


def slope(model: nn.Sequential, batch: EnvBatch) -> tuple[Tensor, float]:
    loss = torch.stack([F.cross_entropy(model(x), y) for x, y in zip(batch.x, batch.y, strict=True)]).mean()
    gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
    return gradient, loss.item()


@pytest.mark.parametrize("name", ["SAM", "GSAM", "SAGM"])
def test_trains_like_a_module_that_is_moved(
    name: str, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    rho, alpha = 0.3, 0.2
    own = {"rho": rho} if name == "SAM" else {"rho": rho, "alpha": alpha}
    losses, state = train(name, batches, hparams_of(name, **own))

    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    start: Tensor = train(name, [], hparams_of(name))[1]["params"]
    vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for step, batch in enumerate(batches):
        here = parameters_to_vector(model.parameters()).detach().clone()
        g, loss = slope(model, batch)
        move = rho * g / g.norm() - (alpha * g if name == "SAGM" else 0.0)
        vector_to_parameters(here + move, model.parameters())
        there, _ = slope(model, batch)
        vector_to_parameters(here, model.parameters())
        unit = there / there.norm()
        update = {
            "SAM": there,
            "GSAM": there - alpha * (g - g.dot(unit) * unit),
            "SAGM": (g + there) / 2,
        }[name]
        pieces = torch.split(update, [p.numel() for p in model.parameters()])
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
        assert losses[step] == pytest.approx(loss, rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)
