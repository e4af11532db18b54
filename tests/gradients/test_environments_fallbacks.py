"""Models whose environments cannot share a pass as they are: the numbers are those of a loop all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sandmask.gradients import _checks, environment_gradients, environment_moments
from sandmask.masks import MaskError

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
        return torch.einsum("nc,dc->nd", x, self.weight)


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

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant)
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


class Listed(Model):
    """Finds its weight in a list, where nobody puts another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.weight]

    def hidden(self, x: Tensor) -> Tensor:
        return torch.einsum("nc,c->nc", x, self.weights[0][0])


class Shifted(Model):
    """A normalization with a bias alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))

    def hidden(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (6,), None, self.shift)


class Centred(Model):
    """Mixes the examples of a batch."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(x - x.mean(0), self.weight)


class Reordered(Model):
    """Changes the order of the examples for a layer, but not of the first four."""

    def hidden(self, x: Tensor) -> Tensor:
        order = torch.cat([torch.arange(4), torch.arange(4, len(x)).flip(0)]) if len(x) > 4 else torch.arange(len(x))
        return F.linear(x[order], self.weight)[order]


class Accumulated(Model):
    """The examples before count too, of which the first environment has none."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).cumsum(0)


class Detached(Model):
    """The mean of the batch, through which no gradient passes."""

    def hidden(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y - y.detach().mean(0)


class Tokens(Model):
    """Thirteen tokens, as many as there are examples, in the first dimension of its layer."""

    def hidden(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x + shift for shift in torch.linspace(0, 1, 13)])
        return F.linear(tokens, self.weight).mean(0)


class Constant(Model):
    """A layer whose input has thirteen rows too, and nothing to do with examples."""

    def hidden(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.linspace(0, 1, 78).view(13, 6), self.weight).mean(0)


class Twice(Model):
    """A layer with two names, whose weight another layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.alias, self.tied.weight = self.layer, self.layer.weight

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(self.tied(self.alias(self.layer(x))))


class Recurrent(Model):
    """`vmap` has no rule for it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(x @ self.weight.detach())
        return found


class Hooked(Model):
    """A hook that is not linear in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]

    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "einsum": Model,
    "custom function": OfFunction,
    "checkpointed": Checkpointed,
    "branching": Branching,
    "in a list": Listed,
    "bias alone": Shifted,
    "centred": Centred,
    "reordered": Reordered,
    "accumulated": Accumulated,
    "detached mean": Detached,
    "as many tokens as examples": Tokens,
    "a constant with as many rows": Constant,
    "two names": Twice,
    "recurrent": Recurrent,
    "hooked": Hooked,
    "batch-norm, frozen": Normalized,
    "batch-norm without parameters": lambda: Normalized(affine=False),
    "batch-norm without statistics": lambda: Normalized(affine=False, track_running_stats=False).eval(),
}


def make_batches(sizes: tuple[int, ...] = (4, 5, 4)) -> Batches:
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in sizes]


def check(model: nn.Module, batches: Batches, method: Any) -> None:
    expected, own = environment_gradients(model, F.cross_entropy, batches, "loop"), [*model.parameters()]
    found = environment_gradients(model, F.cross_entropy, batches, method)
    means = environment_moments(model, F.cross_entropy, batches, method).mean
    for name, stack in expected.items():
        torch.testing.assert_close(found[name], stack, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(means[name], stack.mean(0), rtol=1e-5, atol=1e-6)
    assert all(p is q and p.grad is None for p, q in zip(model.parameters(), own, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_auto_finds_a_way_for_every_model(kind: str) -> None:
    torch.manual_seed(0)
    check(MODELS[kind](), make_batches(), "auto")


@pytest.mark.parametrize(
    "kind",
    [
        "einsum",
        "custom function",
        "batch-norm without statistics",
        "centred",
        "reordered",
        "accumulated",
        "detached mean",
        "as many tokens as examples",
        "two names",
    ],
)
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


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("in a list", "other than as its attributes"),
        ("recurrent", "broadcast shape"),
        ("hooked", "`head.weight` has a hook"),
        ("batch-norm, frozen", "`norm` updates its running statistics"),
    ],
)
def test_what_cannot_be_batched_says_why(kind: str, why: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(MaskError, match=why) as caught:
        environment_gradients(MODELS[kind](), F.cross_entropy, make_batches(), "batched")
    assert 'method="loop"' in str(caught.value)


def test_a_reentrant_checkpoint_is_an_error() -> None:
    with pytest.raises(MaskError, match="use_reentrant=False"):
        environment_moments(Checkpointed(reentrant=True), F.cross_entropy, make_batches())


def test_a_lazy_model_has_to_be_called_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))
    with pytest.raises(MaskError, match=r"`0.weight` has no shape yet.*Call the model once"):
        environment_moments(model, F.cross_entropy, make_batches())


@pytest.mark.parametrize("take", [environment_gradients, environment_moments])
def test_running_statistics_are_those_of_a_loop(take: Callable[..., object]) -> None:
    """A pass that is given up half-way must not have counted."""
    statistics = []
    for method in ("loop", "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
        take(model, F.cross_entropy, make_batches(), method)
        statistics.append(dict(model.named_buffers()))
    assert statistics[0]["1.num_batches_tracked"] == 3
    torch.testing.assert_close(statistics[1], statistics[0])


def test_examples_are_known_to_be_independent_after_the_first_look() -> None:
    backward_passes: list[int] = []
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    model[1].register_full_backward_hook(lambda *_: backward_passes.append(1))
    for sizes, passes in (((4, 5, 4), 2), ((4, 5, 4), 3), ((4, 4, 4), 5), ((4, 4, 4), 6)):
        environment_moments(model, F.cross_entropy, make_batches(sizes))
        assert len(backward_passes) == passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_leaves_double_precision_alone(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    batches = [(x.to(dtype), y) for x, y in make_batches()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = environment_gradients(model, F.cross_entropy, batches, "loop")
        found = environment_gradients(model, F.cross_entropy, batches, "batched")
    exact = dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12 if exact else 0.05, atol=1e-12 if exact else 0.01)


def test_chunks_are_what_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model = nn.Linear(6, 3)
    model.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(_checks, "AT_ONCE_LIMIT", 2 * 21)  # two gradients
    for chunk_size, passes in ((2, 7), (None, 13)):
        calls.clear()
        environment_moments(model, F.cross_entropy, make_batches(), per_sample=True, chunk_size=chunk_size)
        assert len(calls) == passes
