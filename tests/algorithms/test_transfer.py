"""Transfer against modules and PyTorch's optimizers."""

import copy
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


def gap(featurizer: nn.Module, head: nn.Module, batch: EnvBatch) -> Tensor:
    risks = [F.cross_entropy(head(featurizer(x)), y) for x, y in zip(batch.x, batch.y, strict=True)]
    return 0.8 * (max(risks) - min(risks))


@pytest.mark.parametrize(("gda", "delta"), [(0, 2.0), (1, 2.0), (0, 0.05)])
def test_trains_like_modules(
    gda: int, delta: float, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Transfer", t_lambda=0.8, delta=delta, d_steps_per_g=4, lr_d=0.1, gda=gda)
    losses, state = train("Transfer", batches, hparams)

    featurizer = problem.featurizer()
    head: nn.Module = nn.Linear(featurizer.n_features, problem.n_classes)
    model = nn.Sequential(featurizer, head).double()
    start: Tensor = train("Transfer", [], hparams)[1]["params"]
    vector_to_parameters(start.clone(), model.parameters())
    adversary = copy.deepcopy(head)
    kind = torch.optim.SGD if gda else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=3e-3, weight_decay=1e-2)
    distances = []
    for step, batch in enumerate(batches):
        loss = torch.stack([F.cross_entropy(model(x), y) for x, y in zip(batch.x, batch.y, strict=True)]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()  # the classifier's gradients are None: it stays
        gap(featurizer, adversary, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        adversary = copy.deepcopy(head)
        for _ in range(4):
            slopes = torch.autograd.grad(gap(featurizer, adversary, batch), list(adversary.parameters()))
            moved = parameters_to_vector(adversary.parameters()) + 0.1 * parameters_to_vector(slopes)
            center = parameters_to_vector(head.parameters())
            distances.append((moved - center).norm().item())
            moved = center + min(1.0, delta / distances[-1]) * (moved - center)
            vector_to_parameters(moved.detach().clone(), adversary.parameters())
        assert losses[step] == pytest.approx(loss.item(), rel=1e-9)
    assert (max(distances) > delta) == (delta == 0.05)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(state["adversary"], parameters_to_vector(adversary.parameters()).detach())
