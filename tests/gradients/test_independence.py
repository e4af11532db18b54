"""What a first recording could not check is checked later: gradients of zero or inf, and rows that depend on data."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sandmask
from sandmask.masks import ANDMask, MaskError

SIZES = [4, 2]


class Mixed(nn.Module):
    """The second layer has tokens in its first dimension, of which there are as many as examples.

    One output without it, one with it behind a gate that is closed at first, and one of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        mixed = torch.tanh(self.second(x.transpose(0, 1)).transpose(0, 1))
        return torch.stack([x, x + self.gate * mixed, mixed]).sum((2, 3)).T


def step(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
    with sandmask.record(model, SIZES) as recording:
        output = model(x)
    losses = [loss(of_one) for of_one in output.split(SIZES)]
    recording.backward(losses, ANDMask(0.0), check_finite=False)


def without(rows: Tensor) -> Tensor:
    return rows[:, 0].sum()


def gated(rows: Tensor) -> Tensor:
    return rows[:, 1].sum()


def mixed(rows: Tensor) -> Tensor:
    return rows[:, 2].sum()


def infinite(rows: Tensor) -> Tensor:
    return mixed(rows) * torch.inf


@pytest.mark.parametrize(("before", "after"), [(without, mixed), (gated, gated), (infinite, mixed)])
def test_a_layer_without_gradients_is_checked_later(
    before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
) -> None:
    model, x = Mixed(), torch.randn(6, 6, 4)
    for _ in range(2):
        step(model, x, before)
    with torch.no_grad():
        model.gate.fill_(1.0)
    with pytest.raises(MaskError, match="independently"):
        step(model, x, after)


class Packed(nn.Module):
    """A layer on the tokens of all examples, but not on those that fill up an example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(6, 4).masked_scatter(x[..., 0] < 9, self.layer(self.tokens(x)))

    def tokens(self, x: Tensor) -> Tensor:
        return x[x[..., 0] < 9]


class PackedInParts(Packed):
    def tokens(self, x: Tensor) -> Tensor:
        lengths = (x[..., 0] < 9).sum(1).tolist()
        return torch.cat([of_one[:length] for of_one, length in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("build", [Packed, PackedInParts])
def test_rows_that_depend_on_data_are_checked_every_time(build: Callable[[], Packed]) -> None:
    """At first all examples have four tokens, then two on average."""
    model, x = build(), torch.rand(6, 4, 4)
    for _ in range(2):
        step(model, x, torch.sum)
    for example, length in enumerate([0, 1, 1, 3, 3, 4]):
        x[example, length:] = 10
    with pytest.raises(MaskError, match="independently"):
        step(model, x, torch.sum)


class Sorted(nn.Module):
    """A layer on examples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return torch.zeros(6, 1).index_copy(0, order, self.layer(x[order]))


def test_an_order_that_depends_on_data_is_checked_every_time() -> None:
    """At first it is that of the examples."""
    model, x = Sorted(), torch.arange(24.0).view(6, 4)
    for _ in range(2):
        step(model, x, torch.sum)
    with pytest.raises(MaskError, match="independently"):
        step(model, -x, torch.sum)
