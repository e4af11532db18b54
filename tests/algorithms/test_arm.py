"""ARM against modules and a loop over environments."""

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
def test_trains_like_a_loop_over_environments(
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
def test_a_batch_is_its_own_context(problem: Problem) -> None:
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
