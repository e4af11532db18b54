"""Every way to take gradients, against a loop over environments with autograd."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from sandmask.errors import SandmaskError
from sandmask.functional import (
    AcrossRuns,
    Autograd,
    Differentiator,
    Direct,
    EnvBatch,
    Functional,
    Params,
    make_batch,
    random,
)
from sandmask.functional.differentiate import Objective

both = pytest.mark.parametrize("way", [Functional(), Autograd(), Direct()], ids=["functional", "autograd", "direct"])
N_ENVS, N_PARAMS = 4, 6


@pytest.fixture
def batch() -> EnvBatch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_ENVS, 5, N_PARAMS, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (N_ENVS, 5), generator=generator)
    return make_batch(x, y, random.key_of(0))


def losses(vector: Tensor, batch: EnvBatch) -> Tensor:
    return batch.mean((torch.tanh(batch.x @ vector) - batch.y) ** 2)


def naive_gradients(vectors: Tensor, batch: EnvBatch) -> tuple[Tensor, Tensor]:
    gradients, values = [], []
    for e in range(N_ENVS):
        leaf = vectors[e].clone().requires_grad_()
        value = ((torch.tanh(batch.x[e] @ leaf) - batch.y[e]) ** 2).mean()
        gradients.append(torch.autograd.grad(value, leaf)[0])
        values.append(value.detach())
    return torch.stack(gradients), torch.stack(values)


@both
def test_gradient_value_and_auxiliary_output(way: Differentiator, batch: EnvBatch) -> None:
    vector = torch.linspace(-1, 1, N_PARAMS, dtype=torch.float64)

    def objective(vector: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        each = losses(vector, batch)
        return each.mean(), {"each": each, "constant": torch.ones(2)}

    gradient, value, aux = way.gradient(objective, vector)
    gradients, values = naive_gradients(vector.expand(N_ENVS, -1), batch)
    torch.testing.assert_close(gradient, gradients.mean(0))
    torch.testing.assert_close(value, values.mean())
    torch.testing.assert_close(aux["each"], values)
    assert torch.equal(aux["constant"], torch.ones(2))
    assert not any(t.requires_grad for t in (gradient, value, aux["each"], vector))


@both
def test_a_pullback_is_the_gradient_in_two_parts(way: Differentiator, batch: EnvBatch) -> None:
    vector = torch.linspace(-1, 1, N_PARAMS, dtype=torch.float64)
    values, pull = way.pullback(lambda vector: losses(vector, batch), vector)
    gradients, wanted = naive_gradients(vector.expand(N_ENVS, -1), batch)
    torch.testing.assert_close(values, wanted)
    weights = values.detach() + 1
    gradient = pull(weights)
    torch.testing.assert_close(gradient, weights @ gradients)
    assert not any(t.requires_grad for t in (gradient, values, vector))


def test_pullbacks_of_stacked_runs(batch: EnvBatch) -> None:
    vectors = torch.randn(3, N_PARAMS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(way: Differentiator, vector: Tensor) -> tuple[Tensor, Tensor]:
        values, pull = way.pullback(lambda vector: losses(vector, batch), vector)
        return values, pull(values + 1)

    for way in (AcrossRuns(), Functional()):
        values, gradients = vmap(lambda vector: gradient(way, vector))(vectors)  # noqa: B023
        for k, vector in enumerate(vectors):
            own, wanted = gradient(Direct(), vector)
            torch.testing.assert_close(values[k], own)
            torch.testing.assert_close(gradients[k], wanted)


@both
def test_gradients_within_the_objective(way: Differentiator) -> None:
    """The gradient of |grad f|^2 for f = sum v^3 is 36 v^3."""

    def objective(vector: Tensor) -> tuple[Tensor, tuple[()]]:
        slope = torch.func.grad(lambda v: (v**3).sum())(vector)
        return slope.square().sum(), ()

    vector = torch.tensor([-1.0, 0.5, 2.0])
    gradient, value, _ = way.gradient(objective, vector)
    torch.testing.assert_close(gradient, 36 * vector**3)
    torch.testing.assert_close(value, (9 * vector**4).sum())


@both
@pytest.mark.parametrize("log_magnitude", [False, True])
def test_moments_over_environments(way: Differentiator, batch: EnvBatch, log_magnitude: bool) -> None:
    vector = torch.linspace(-1, 1, N_PARAMS, dtype=torch.float64)
    moments, values = way.environment_moments(losses, vector, batch, log_magnitude=log_magnitude)
    gradients, expected = naive_gradients(vector.expand(N_ENVS, -1), batch)
    torch.testing.assert_close(values, expected)
    assert moments.count == N_ENVS
    torch.testing.assert_close(moments.mean, gradients.mean(0))
    torch.testing.assert_close(moments.sign_sum, gradients.sign().sum(0))
    torch.testing.assert_close(moments.m2, gradients.var(0) * (N_ENVS - 1))
    if log_magnitude:
        assert moments.log_sum is not None
        torch.testing.assert_close(moments.log_sum, (gradients.abs() + 1e-10).log().sum(0))
    else:
        assert moments.log_sum is None


@both
def test_gradients_of_environments_each_at_a_vector_of_its_own(way: Differentiator, batch: EnvBatch) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(N_ENVS, N_PARAMS, generator=generator, dtype=torch.float64)
    gradients, values = way.environment_gradients(losses, vectors, batch)
    expected_gradients, expected_values = naive_gradients(vectors, batch)
    torch.testing.assert_close(gradients, expected_gradients)
    torch.testing.assert_close(values, expected_values)
    assert not gradients.requires_grad


@pytest.mark.parametrize("way", [Functional(), AcrossRuns()], ids=["functional", "across-runs"])
def test_ways_that_stack(way: Differentiator, batch: EnvBatch) -> None:
    vectors = torch.randn(3, N_PARAMS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def means(vector: Tensor) -> tuple[Tensor, Tensor]:
        moments, values = way.environment_moments(losses, vector, batch)
        return moments.mean, values

    together, values = vmap(means)(vectors)
    for k in range(3):
        gradients, expected = naive_gradients(vectors[k].expand(N_ENVS, -1), batch)
        torch.testing.assert_close(together[k], gradients.mean(0))
        torch.testing.assert_close(values[k], expected)


def scattered(way: Differentiator, vector: Tensor, batch: EnvBatch) -> tuple[Tensor, Tensor]:
    """An objective that contains the environments' gradients, by two parameters, and the risks."""

    def risks(params: Params, batch: EnvBatch) -> Tensor:
        return losses(torch.cat([params["a"], params["b"]]), batch)

    a, b = torch.split(vector, [2, N_PARAMS - 2])
    gradients, values = way.inner_gradients(risks, {"a": a, "b": b}, batch)
    distances = [(gradient - gradient.mean(0)).square().sum() for gradient in gradients.values()]
    return values.mean() + 3.0 * (distances[0] + distances[1]), values


@pytest.mark.parametrize(
    ("way", "stacked"),
    [(Functional(), False), (Autograd(), False), (Direct(), False), (Functional(), True), (AcrossRuns(), True)],
    ids=["functional", "autograd", "direct", "functional-stacked", "across-runs-stacked"],
)
def test_gradients_of_environments_within_the_objective(way: Differentiator, stacked: bool, batch: EnvBatch) -> None:
    vectors = torch.randn(3, N_PARAMS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def step(vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return way.gradient(lambda vector: scattered(way, vector, batch), vector)

    found = vmap(step)(vectors) if stacked else [torch.stack(each) for each in zip(*map(step, vectors), strict=True)]
    for k, vector in enumerate(vectors):
        leaf = vector.clone().requires_grad_()
        rows, values = [], []
        for e in range(N_ENVS):
            values.append(((torch.tanh(batch.x[e] @ leaf) - batch.y[e]) ** 2).mean())
            rows.append(torch.autograd.grad(values[e], leaf, create_graph=True)[0])
        matrix = torch.stack(rows)
        value = torch.stack(values).mean() + 3.0 * ((matrix - matrix.mean(0)) ** 2).sum()
        torch.testing.assert_close(found[0][k], torch.autograd.grad(value, leaf)[0])
        torch.testing.assert_close(found[1][k], value.detach())
        torch.testing.assert_close(found[2][k], torch.stack(values).detach())
    assert not any(tensor.requires_grad for tensor in found)


def alone(way: Differentiator, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The gradient of one run, in a stack of one where the way needs a stack."""
    if not isinstance(way, AcrossRuns):
        return way.gradient(objective, vector)
    stack = vmap(partial(way.gradient, objective))(vector.unsqueeze(0))
    found: tuple[Tensor, Tensor, Any] = pytree.tree_map(lambda tensor: tensor.squeeze(0), stack)
    return found


@pytest.mark.parametrize("way", [Functional(), Autograd(), Direct(), AcrossRuns()], ids=lambda way: type(way).__name__)
def test_gradients_within_the_objective_of_parameters_that_it_does_not_use_are_zero(
    way: Differentiator, batch: EnvBatch
) -> None:
    def objective(vector: Tensor) -> tuple[Tensor, Params]:
        used, unused = torch.split(vector, [N_PARAMS, 2])
        gradients, values = way.inner_gradients(
            lambda p, b: losses(p["used"], b), {"used": used, "unused": unused}, batch
        )
        return values.mean() + gradients["used"].square().sum(), gradients

    vector = torch.linspace(-1, 1, N_PARAMS + 2, dtype=torch.float64)
    gradient, _, found = alone(way, objective, vector)
    assert torch.equal(found["unused"], torch.zeros(N_ENVS, 2, dtype=torch.float64))
    torch.testing.assert_close(found["used"], naive_gradients(vector[:N_PARAMS].expand(N_ENVS, -1), batch)[0])
    assert torch.equal(gradient[N_PARAMS:], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("way", [Direct(), AcrossRuns()], ids=["direct", "across-runs"])
def test_risks_within_the_objective_depend_on_the_parameters(way: Differentiator, batch: EnvBatch) -> None:
    def objective(vector: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = way.inner_gradients(lambda _, b: b.mean(b.y.double()), {"a": vector}, batch)
        return gradients["a"].sum(), values

    with pytest.raises(SandmaskError, match="does not depend on the parameters"):
        alone(way, objective, torch.ones(2))
