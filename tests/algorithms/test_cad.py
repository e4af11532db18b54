"""CAD and CondCAD against loops over examples."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import Problem, State
from sandmask.algorithms._functions import pairs_of
from sandmask.algorithms.cad import bottleneck
from sandmask.functional import EnvBatch, make_batch, random

Minibatches = list[tuple[Tensor, Tensor]]
MakeHparams = Callable[..., dict[str, Tensor]]


def naive_penalty(z: Tensor, y: list[int], d: list[int], temperature: float, flipped: bool, cond: bool) -> Tensor:
    losses = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        alike = [j for j in others if y[j] == y[i]]
        among = alike if cond else others
        chosen = [j for j in among if (d[j] != d[i]) == flipped]
        if alike and chosen:
            scores = {j: torch.exp(z[i].dot(z[j]) / temperature) for j in among}
            share = torch.stack([scores[j] for j in chosen]).sum() / torch.stack([*scores.values()]).sum()
            losses.append((-1 if flipped else 1) * temperature / 0.07 * torch.log(share))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", ["CAD", "CondCAD"])
@pytest.mark.parametrize("flipped", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
def test_trains_like_loops(
    name: str,
    flipped: bool,
    normalized: bool,
    hparams_of: MakeHparams,
    assert_minimizes: Callable[..., None],
) -> None:
    def naive(model: nn.ModuleDict, minibatches: Minibatches, step: int) -> Tensor:
        features = [model["featurizer"](x) for x, _ in minibatches]
        risks = [F.cross_entropy(model["classifier"](z), y) for z, (_, y) in zip(features, minibatches, strict=True)]
        z = torch.cat(features)
        z = z / z.norm(dim=1, keepdim=True) if normalized else z
        y = torch.cat([y for _, y in minibatches]).tolist()
        d = [e for e, (_, y) in enumerate(minibatches) for _ in y]
        return torch.stack(risks).mean() + 2.0 * naive_penalty(z, y, d, 0.5, flipped, name == "CondCAD")

    options = {"is_flipped": float(flipped), "is_normalized": float(normalized)}
    assert_minimizes(name, hparams_of(name, lmbda=2, temperature=0.5, **options), naive)


@pytest.mark.parametrize("flipped", [True, False])
@pytest.mark.parametrize("conditional", [True, False])
def test_an_example_alone_in_its_class_does_not_count(flipped: bool, conditional: bool) -> None:
    z = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, d = [0, 0, 1, 2, 1, 0], [0, 0, 0, 1, 1, 1]
    pairs = pairs_of(make_batch(z.view(2, 3, 3), torch.tensor(y).view(2, 3), random.key_of(0)))
    found = 0.5 / 0.07 * bottleneck(z @ z.T / 0.5, pairs, torch.tensor(flipped), conditional)
    torch.testing.assert_close(found, naive_penalty(z, y, d, 0.5, flipped, conditional))


@pytest.mark.parametrize("name", ["CAD", "CondCAD"])
def test_an_example_alone_has_no_penalty(
    name: str,
    problem: Problem,
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    alone = Problem(problem.featurizer, 1, problem.n_classes, problem.input_shape)
    few = [EnvBatch(*(field[:1, :1] for field in batch)) for batch in batches]
    losses, state = train(name, few, hparams_of(name, lmbda=9), problem=alone)
    expected, erm = train("ERM", few, hparams_of("ERM"), problem=alone)
    assert losses == pytest.approx(expected)
    assert all(math.isfinite(loss) for loss in losses)
    torch.testing.assert_close(state["params"], erm["params"])
