"""MTL and ARM, whose predictions depend on the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms.arm import ARM, context_network
from sandmask.functional import EnvBatch, make_batch, random
from sandmask.networks import MLP, Featurizer, MNISTConvNet

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def model_of(problem: Problem, vector: Tensor) -> nn.ModuleDict:
    featurizer = problem.featurizer()
    classifier = nn.Linear(2 * featurizer.n_features, problem.n_classes)
    model = nn.ModuleDict({"featurizer": featurizer, "classifier": classifier}).double()
    vector_to_parameters(vector.clone(), model.parameters())
    return model


@pytest.mark.parametrize("ema", [0.5, 0.9, 1.0])
def test_mtl_trains_like_a_loop_over_environments(
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


def test_mtl_predicts_with_the_mean_feature_of_the_batch(
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


def vectors(extra_channels: int = 0) -> Featurizer:
    return MLP(5 + extra_channels, width=8, depth=3, n_outputs=6)


def images(extra_channels: int = 0) -> Featurizer:
    return MNISTConvNet(2 + extra_channels)


VECTORS, IMAGES = Problem(vectors, 3, 4, (5,)), Problem(images, 3, 4, (2, 6, 6))


class Naive:
    """The model and its context network as modules."""

    def __init__(self, problem: Problem, state: State) -> None:
        dtype = state["params"].dtype
        self.context = context_network(problem.input_shape).to(dtype)
        n_channels = 1 if len(problem.input_shape) == 3 else problem.input_shape[0]
        featurizer = problem.featurizer(extra_channels=n_channels)
        self.model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).to(dtype)
        vector_to_parameters(state["params"].clone(), self.model.parameters())
        vector_to_parameters(state["context"].clone(), self.context.parameters())
        self.parameters = [*self.model.parameters(), *self.context.parameters()]

    def logits(self, x: Tensor) -> Tensor:
        mean = self.context(x).mean(0)
        logits: Tensor = self.model(torch.stack([torch.cat([row, mean]) for row in x]))
        return logits


def image_batches() -> list[EnvBatch]:
    generator = torch.Generator().manual_seed(0)
    return [
        make_batch(
            torch.rand(3, 4, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(4, (3, 4), generator=generator),
            random.key_of(step),
        )
        for step in range(2)
    ]


@pytest.mark.parametrize("problem", [VECTORS, IMAGES], ids=["vectors", "images"])
def test_arm_trains_like_a_loop_over_environments(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    batches = batches if problem is VECTORS else image_batches()
    hparams = hparams_of("ARM", lr=1e-3)
    losses, state = train("ARM", batches, hparams, problem)
    start = train("ARM", [], hparams, problem)[1]
    naive = Naive(problem, start)
    optimizer = torch.optim.Adam(naive.parameters, lr=1e-3, weight_decay=1e-2)
    for batch, ours in zip(batches, losses, strict=True):
        loss = torch.zeros((), dtype=torch.float64)
        for x, y in zip(batch.x, batch.y, strict=True):
            loss = loss + F.cross_entropy(naive.logits(x), y) / 3
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert ours == pytest.approx(loss.item(), rel=1e-9)
    ours_vector = torch.cat([state["params"], state["context"]])
    expected = parameters_to_vector(naive.parameters).detach()
    torch.testing.assert_close(ours_vector, expected, rtol=1e-7, atol=1e-7)
    assert not torch.equal(state["context"], start["context"])


@pytest.mark.parametrize("problem", [VECTORS, IMAGES], ids=["vectors", "images"])
def test_a_batch_is_the_context_of_arm(problem: Problem) -> None:
    algorithm = ALGORITHMS["ARM"].build(problem)
    state = algorithm.init(0)
    x = torch.randn(5, *problem.input_shape)
    logits = algorithm.predict(state, x)
    torch.testing.assert_close(logits, Naive(problem, state).logits(x).detach(), rtol=1e-4, atol=1e-5)
    assert algorithm.uses_context
    assert not torch.allclose(logits[:2], algorithm.predict(state, x[:2]))


@pytest.mark.parametrize(("problem", "n_more"), [(VECTORS, 5), (IMAGES, 1)], ids=["vectors", "images"])
def test_the_context_is_the_mean_over_the_true_examples_of_the_environment(problem: Problem, n_more: int) -> None:
    algorithm = ALGORITHMS["ARM"].build(problem)
    assert isinstance(algorithm, ARM)
    context, n = algorithm.init(0)["context"], problem.input_shape[0]
    x = torch.randn(2, 4, *problem.input_shape)
    weight = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
    out = algorithm.with_context(context, x, weight)
    assert out.shape == (2, 4, n + n_more, *problem.input_shape[1:])
    assert torch.equal(out[:, :, :n], x)
    module = context_network(problem.input_shape)
    vector_to_parameters(context.clone(), module.parameters())
    for e, count in enumerate((3, 2)):
        mean = module(x[e, :count]).mean(0).detach()
        for row in out[e, :, n:]:
            torch.testing.assert_close(row, mean, rtol=1e-4, atol=1e-5)
