"""MTL against modules, a loop over environments and PyTorch's Adam."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import EnvBatch
from sandmask.networks import MLP

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def model_of(problem: Problem, vector: Tensor) -> nn.ModuleDict:
    featurizer = problem.featurizer()
    classifier = nn.Linear(2 * featurizer.n_features, problem.n_classes)
    model = nn.ModuleDict({"featurizer": featurizer, "classifier": classifier}).double()
    vector_to_parameters(vector.clone(), model.parameters())
    return model


@pytest.mark.parametrize("ema", [0.5, 0.9, 1.0])
def test_trains_like_a_loop_over_environments(
    ema: float, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("MTL", mtl_ema=ema)
    losses, state = train("MTL", batches, hparams)

    model = model_of(problem, train("MTL", [], hparams)[1]["params"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    embeddings = [torch.zeros(problem.featurizer().n_features, dtype=torch.float64) for _ in range(3)]
    for batch, ours in zip(batches, losses, strict=True):
        loss = torch.zeros((), dtype=torch.float64)
        for e in range(3):
            features = model["featurizer"](batch.x[e])
            embedding = ema * features.mean(0) + (1 - ema) * embeddings[e]
            embeddings[e] = embedding.detach()
            rows = torch.stack([torch.cat([row, embedding]) for row in features])
            loss = loss + F.cross_entropy(model["classifier"](rows), batch.y[e]) / 3
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert ours == pytest.approx(loss.item(), rel=1e-9)
    torch.testing.assert_close(state["embeddings"], torch.stack(embeddings), rtol=1e-7, atol=1e-9)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)


def test_predicts_with_the_mean_feature_of_the_batch(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    _, state = train("MTL", batches, hparams_of("MTL"))
    algorithm, model = ALGORITHMS["MTL"].build(problem), model_of(problem, state["params"])
    x = batches[0].x[1]
    features = model["featurizer"](x)
    rows = torch.cat([features, features.mean(0).repeat(len(x), 1)], 1)
    torch.testing.assert_close(algorithm.predict(state, x), model["classifier"](rows).detach())
    assert algorithm.uses_context
    assert not torch.allclose(algorithm.predict(state, x)[:2], algorithm.predict(state, x[:2]))


def test_the_classifier_is_twice_as_wide_and_building_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    algorithm = ALGORITHMS["MTL"].build(Problem(lambda: MLP(4, 6, 3, 5), 2, 3, (4,)))
    assert torch.equal(before, torch.random.get_rng_state())
    shapes = {slot.name: tuple(slot.shape) for slot in algorithm.network.slots}
    assert shapes["classifier.weight"] == (3, 10)
