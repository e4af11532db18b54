from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.gradients import environment_gradients, environment_moments, set_gradients
from sandmask.masks import ANDMask, GeometricMean, MaskError, SANDMask

SIZES = {"equal": [5, 5, 5], "unequal": [3, 5, 3, 1], "two": [4, 4]}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    if kind == "conv":
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(24, 3),
        )
    if kind == "frozen":
        norm = nn.BatchNorm2d(4)
        norm.running_mean, norm.running_var = torch.rand(4), 0.5 + torch.rand(4)
        parts = [
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 3, padding=1),
            norm,
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 3),
        ]
        return nn.Sequential(*parts).eval()
    if kind == "shared":
        return Shared()
    if kind == "odd":
        return Odd()
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 3))


class Shared(nn.Module):
    """Uses a layer twice, and has one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.idle = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.layer(torch.relu(self.layer(x)))))
        return out


class Odd(nn.Module):
    """Uses a parameter outside of the usual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(x + self.shift))
        return out


def make_batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in sizes]


def naive(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """One environment after the other with `.backward()`."""
    rows = []
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        rows.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return {name: torch.stack([row.get(name, zero) for row in rows]) for name, zero in zeros.items()}


@pytest.mark.parametrize("method", ["loop", "batched", "auto"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["mlp", "conv", "norm", "frozen", "shared", "odd"])
def test_every_method_gives_the_same_numbers(kind: str, sizes: str, method: str) -> None:
    model, batches = make_model(kind), make_batches(SIZES[sizes])
    expected = naive(model, batches)
    found = environment_gradients(model, F.cross_entropy, batches, method)  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    for name, stack in expected.items():
        torch.testing.assert_close(found[name], stack, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("method", ["loop", "batched"])
def test_per_sample_makes_every_example_an_environment(method: str) -> None:
    model, batches = make_model("mlp"), make_batches([3, 2])
    singles = [(x[i : i + 1], y[i : i + 1]) for x, y in batches for i in range(len(y))]
    found = environment_gradients(model, F.cross_entropy, batches, method, per_sample=True)  # type: ignore[arg-type]
    for name, stack in naive(model, singles).items():
        torch.testing.assert_close(found[name], stack, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("mask", [SANDMask(tau=0.2), ANDMask(tau=1.0), GeometricMean(tau=1.0)])
def test_moments_give_the_masked_mean_of_the_gradients(mask: SANDMask, chunk_size: int | None) -> None:
    model, batches = make_model("mlp"), make_batches([4, 4, 2])
    expected = mask(naive(model, batches))
    moments = environment_moments(
        model, F.cross_entropy, batches, "batched", chunk_size=chunk_size, log_magnitude=mask.needs_log_magnitude
    )
    report = set_gradients(model.named_parameters(), mask, moments)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
    assert 0 <= report.density <= 1


def test_a_loss_that_looks_at_the_parameters_is_taken_another_way() -> None:
    """A penalty belongs to every environment; in one pass its gradient could not be told apart."""
    model, batches = make_model("mlp"), make_batches([4, 4, 4])

    def penalized(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y) + sum((p**2).sum() for p in model.parameters())

    for per_sample in (False, True):
        expected = environment_gradients(model, penalized, batches, "loop", per_sample=per_sample)
        found = environment_gradients(model, penalized, batches, "auto", per_sample=per_sample)
        for name, stack in expected.items():
            torch.testing.assert_close(found[name], stack, rtol=1e-5, atol=1e-6)
        with pytest.raises(MaskError, match="uses the model's parameters"):
            environment_gradients(model, penalized, batches, "batched", per_sample=per_sample)


class Pair(nn.Module):
    """A model with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def test_a_model_with_two_outputs() -> None:
    model, batches = Pair(), make_batches([4, 4])

    def first(output: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(output[0], y)

    expected = environment_gradients(model, first, batches, "loop")
    torch.testing.assert_close(environment_gradients(model, first, batches, "auto"), expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_left_out() -> None:
    model, batches = make_model("mlp"), make_batches([4, 4])
    next(model.parameters()).requires_grad_(False)
    for method in ("loop", "batched"):
        found = environment_gradients(model, F.cross_entropy, batches, method)
        assert "0.weight" not in found
        assert "0.bias" in found


def test_mistakes_are_named() -> None:
    model = make_model("mlp")
    with pytest.raises(MaskError, match="`method` should be one of"):
        environment_gradients(model, F.cross_entropy, make_batches([2, 2]), "fast")  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="Found none"):
        environment_gradients(model, F.cross_entropy, [])
    with pytest.raises(MaskError, match=r"Environment 1 has inputs of shape \(3, 6\) and targets of shape \(2,\)"):
        environment_gradients(
            model, F.cross_entropy, [*make_batches([2]), (torch.randn(3, 6), torch.zeros(2, dtype=torch.int64))]
        )
    moments = environment_moments(model, F.cross_entropy, make_batches([2, 2]))
    with pytest.raises(MaskError, match="is missing: pass"):
        set_gradients(nn.Linear(2, 2).named_parameters(), ANDMask(tau=1.0), moments)
