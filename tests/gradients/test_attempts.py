"""Ways to take gradients that fail leave nothing behind, and are not tried again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from sandmask.gradients import environment_gradients, environment_moments, record
from sandmask.masks import ANDMask, MaskError


def make_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in (4, 5, 4)]


class Counting(nn.Module):
    """Averages what it sees: a loop does so once for each environment."""

    mean: Tensor
    seen: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))
        self.way = way
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "replaced":
            self.mean = 0.5 * self.mean + x.mean(0)
        else:
            self.seen += 1
            self.mean.mul_(0.5).add_(x.mean(0))
        return (x - self.mean) @ self.weight.T if self.way == "by vmap" else F.linear(x - self.mean, self.weight)


@pytest.mark.parametrize("way", ["replaced", "in place", "by vmap"])
def test_buffers_change_once_for_each_environment(way: str) -> None:
    """Also those of the spectral norm, which is estimated better with every pass."""
    found = []
    for method in ("loop", "auto", "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(way), spectral_norm(nn.Linear(3, 3)))
        gradients = environment_gradients(model, F.cross_entropy, make_batches(), method)
        found.append([gradients, environment_moments(model, F.cross_entropy, make_batches(), method).mean])
        found[-1].append(dict(model.named_buffers()))
        torch.testing.assert_close(found[-1], found[0])
        with pytest.raises(MaskError, match=r"cannot be batched"):
            environment_gradients(model, F.cross_entropy, make_batches(), "batched")
        torch.testing.assert_close(found[-1][-1], dict(model.named_buffers()))


class Shared(nn.Module):
    """Uses a layer twice, and does not use another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.idle = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(torch.relu(self.layer(x))))
        return found


class Summed(nn.Linear):
    """It cannot be recorded."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,cd->nc", x, self.weight)


class Recurrent(nn.Module):
    """A recurrent layer behind one that can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 4), nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.first(x)[:, None])[0][:, -1]
        return found


PASSES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "in one pass": (Shared, 1),
    "by vmap for two sizes": (Summed, 2),
    "in a loop": (Recurrent, 3),
    "in a loop because of buffers": (lambda: Counting("in place"), 3),
}


@pytest.mark.parametrize("way", PASSES)
def test_a_way_that_failed_is_not_tried_again(way: str) -> None:
    torch.manual_seed(0)
    build, passes = PASSES[way]
    model, calls = build(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(3):
        calls.clear()
        environment_moments(model, lambda logits, y: F.cross_entropy(2 * logits, y), make_batches())
    assert len(calls) == passes


def test_a_mistake_is_not_remembered() -> None:
    model, calls = nn.Linear(6, 3), []
    model.register_forward_hook(lambda *_: calls.append(1))
    environment_moments(model, F.cross_entropy, make_batches())
    model.double()
    with pytest.raises(RuntimeError, match="same dtype"):
        environment_moments(model, F.cross_entropy, make_batches())
    model.float()
    calls.clear()
    environment_moments(model, F.cross_entropy, make_batches())
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_with_buffers_is_looped() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    expected = environment_gradients(model, F.cross_entropy, make_batches(), "loop")
    found = environment_gradients(torch.jit.script(model), F.cross_entropy, make_batches())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-6])
def test_small_gradients_in_float16_do_not_look_like_those_of_other_environments(scale: float) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).half()
    batches = [(x.half(), y) for x, y in make_batches()]
    sizes = [len(y) for _, y in batches]
    with record(model, sizes) as recording:
        outputs = model(torch.cat([x for x, _ in batches])).split(sizes)
    losses = [F.cross_entropy(rows.float(), y) * scale for rows, (_, y) in zip(outputs, batches, strict=True)]
    recording.backward(losses, ANDMask(tau=0.0))
    assert model[0].weight.grad is not None


def test_examples_that_depend_on_each_other_in_float16_are_noticed() -> None:
    class Centered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(6, 32), Centered(), nn.Linear(32, 3)).half()
    batches = [(x.half(), y) for x, y in make_batches()]
    sizes = [len(y) for _, y in batches]
    with record(model, sizes) as recording:
        outputs = model(torch.cat([x for x, _ in batches])).split(sizes)
    losses = [F.cross_entropy(rows.float(), y) for rows, (_, y) in zip(outputs, batches, strict=True)]
    with pytest.raises(MaskError, match="independently"):
        recording.backward(losses, ANDMask(tau=0.0))
