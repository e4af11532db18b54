"""Models whose environments cannot share a pass as they are: the numbers are those of a loop all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sandmask.gradients import environment_gradients, environment_moments
from sandmask.masks import GradientMoments, MaskError

Batches = list[tuple[Tensor, Tensor]]


class Model(nn.Module):
    """A layer of its own making, and a classifier on it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.hidden(x)))
        return out

    def hidden(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


class OfFunction(Model):
    """No torch function is called with its weight."""

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found


class Checkpointed(Model):
    """Computes its layer again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x @ self.weight.detach(), use_reentrant=False)
        return found


class Branching(Model):
    """Looks at values, which `vmap` does not allow."""

    def hidden(self, x: Tensor) -> Tensor:
        y = x * self.weight[0]
        return y if float(y.detach().sum()) > 0 else -y


class Normalized(Model):
    """Batch-norm whose parameters, if there are any, do not train."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, **how).requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(x))
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transposed": Model,
    "custom function": OfFunction,
    "checkpointed": Checkpointed,
    "branching": Branching,
    "batch-norm, frozen": Normalized,
    "batch-norm without parameters": lambda: Normalized(affine=False),
    "batch-norm without statistics": lambda: Normalized(affine=False, track_running_stats=False).eval(),
}


def make_batches(sizes: tuple[int, ...] = (4, 5, 4)) -> Batches:
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in sizes]


def check(model: nn.Module, batches: Batches, method: Any) -> None:
    expected = environment_gradients(model, F.cross_entropy, batches, "loop")
    found = environment_gradients(model, F.cross_entropy, batches, method)
    means = environment_moments(model, F.cross_entropy, batches, method).mean
    for name, stack in expected.items():
        torch.testing.assert_close(found[name], stack, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(means[name], stack.mean(0), rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_auto_finds_a_way_for_every_model(kind: str) -> None:
    torch.manual_seed(0)
    check(MODELS[kind](), make_batches(), "auto")


@pytest.mark.parametrize("kind", ["transposed", "custom function", "batch-norm without statistics"])
def test_batched_goes_through_vmap(kind: str) -> None:
    torch.manual_seed(0)
    check(MODELS[kind](), make_batches(), "batched")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_whose_layers_nobody_sees() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    check(torch.jit.script(model), make_batches(), "auto")


def test_environments_with_inputs_of_different_shapes() -> None:
    class OfSequences(Model):
        def hidden(self, x: Tensor) -> Tensor:
            return (x @ self.weight).mean(1)

    torch.manual_seed(0)
    batches = [(torch.randn(4, length, 6), torch.randint(0, 3, (4,))) for length in (2, 3, 2)]
    check(OfSequences(), batches, "auto")


def test_only_the_model_is_differentiated() -> None:
    """What else the losses depend on keeps its `.grad` as it is."""
    temperature = torch.ones((), requires_grad=True)
    batches = [(x.requires_grad_(), y) for x, y in make_batches()]
    environment_gradients(nn.Linear(6, 3), lambda logits, y: F.cross_entropy(logits * temperature, y), batches)
    assert temperature.grad is None
    assert all(x.grad is None for x, _ in batches)


@pytest.mark.parametrize("method", ["loop", "batched", "auto"])
def test_an_error_names_the_environment_by_its_number(method: Any) -> None:
    batches = make_batches((4, 5, 4))
    batches[1][0][0, 0] = torch.nan
    for chunk_size in (None, 1, 2):
        with pytest.raises(MaskError, match="in environment 1 should be finite"):
            environment_moments(nn.Linear(6, 3), F.cross_entropy, batches, method, chunk_size=chunk_size)


def test_stacks_are_numbered_on() -> None:
    moments = GradientMoments.of_stack(torch.ones(3, 2))
    with pytest.raises(MaskError, match="in environment 4 should be finite"):
        moments.update_stack(torch.tensor([[1.0, 1.0], [torch.inf, 1.0]]))


@pytest.mark.parametrize("method", ["loop", "auto"])
def test_a_model_without_a_parameter_to_train_is_a_mistake(method: Any) -> None:
    with pytest.raises(MaskError, match="all are frozen"):
        environment_gradients(nn.Linear(6, 3).requires_grad_(False), F.cross_entropy, make_batches(), method)
