"""IGA against double backward in a loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import Problem, State
from sandmask.algorithms.iga import scatter
from sandmask.functional import Autograd, EnvBatch, Functional, random
from sandmask.networks import MNISTConvNet


@pytest.mark.parametrize("constant_mean", [True, False])
def test_trains_like_a_loop_with_double_backward(
    hparams_of: Callable[..., dict[str, Tensor]], assert_minimizes: Callable[..., None], constant_mean: bool
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        rows = []
        for risk in risks:
            gradients = torch.autograd.grad(risk, list(model.parameters()), create_graph=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        mean = (rows[0] + rows[1] + rows[2]) / 3
        if constant_mean:
            mean = mean.detach()
        distance = sum(((row - mean) ** 2).sum() for row in rows)
        return (risks[0] + risks[1] + risks[2]) / 3 + 30.0 * distance

    assert_minimizes("IGA", hparams_of("IGA", penalty=30), naive)


def test_scatter_of_equal_gradients_is_zero() -> None:
    gradient = torch.randn(3, 4)
    assert scatter({"w": gradient.expand(5, 3, 4)}).item() == pytest.approx(0.0, abs=1e-10)
    assert scatter({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([[0.0], [2.0]])}).item() == pytest.approx(4.0)


def test_both_differentiators_agree_on_a_convolutional_network(
    hparams_of: Callable[..., dict[str, Tensor]], train: Callable[..., tuple[list[float], State]]
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.tensor([[0, 1, 0], [1, 1, 0]])
    batch = EnvBatch(x, y, torch.ones(2, 3), random.keys(random.key_of(0), 2, 3))
    params = []
    for differentiate in (Functional(), Autograd()):
        problem = Problem(lambda: MNISTConvNet(1), 2, 2, (1, 8, 8), differentiate=differentiate)
        hparams = hparams_of("IGA", penalty=10, lr=1e-3)
        losses, state = train("IGA", [batch], hparams, problem=problem)
        assert torch.tensor(losses).isfinite().all()
        params.append(state["adam"].mean)  # the gradient: Adam's sign would hide its size
    torch.testing.assert_close(params[0], params[1], rtol=1e-7, atol=1e-10)
