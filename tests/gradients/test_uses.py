"""Parameters that are used outside of layers are recorded as a loop over environments sees them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sandmask
from sandmask.gradients import environment_gradients
from sandmask.masks import ANDMask, GeometricMean, Mask, MaskError, SANDMask

SIZES = [[4, 4, 4], [5, 2, 4]]


class Model(nn.Module):
    """Features [N, 6, 4] of an input of the same shape, which a linear layer classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.features(self.first(x))).mean(1))
        return logits

    def features(self, x: Tensor) -> Tensor:
        return x


class Tokens(Model):
    """A class token, positions, and a scale for each channel, as in vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.register = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4))
        self.places, self.scale = nn.Parameter(torch.randn(1, 8, 4)), nn.Parameter(torch.randn(4))

    def features(self, x: Tensor) -> Tensor:
        tokens = [self.token.expand(len(x), -1, -1), self.register.repeat(len(x), 1, 1), x]
        x = torch.cat(tokens, 1) + self.places
        x *= self.scale
        return x


class Rescaled(Model):
    """One number, RMS-norm, and a table that is used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.norm = nn.Parameter(torch.zeros(())), nn.RMSNorm(4)
        self.table = nn.Parameter(torch.randn(4, 4))

    def features(self, x: Tensor) -> Tensor:
        mixed = F.linear(self.norm(x), self.table) @ self.table
        return mixed * self.log_scale.exp() - torch.addmm(self.table[1], x.flatten(0, 1), self.table[:, :4]).view_as(x)


class Biased(Model):
    """Attention with a table of relative positions as its bias; positions that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Parameter(torch.randn(11)), nn.Embedding(6, 4)
        self.register_buffer("index", torch.arange(6)[:, None] - torch.arange(6) + 5)

    def features(self, x: Tensor) -> Tensor:
        x = (x + self.places(torch.arange(6)))[:, None]
        bias = self.table[self.index.view(-1)].view(1, 6, 6)  # type: ignore[operator]
        attended = F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
        mixed: Tensor = (x @ x.mT + bias.unsqueeze(0)).softmax(-1) @ attended
        return mixed[:, 0]


class Heads(Model):
    """Keys of two heads that all examples share, and a matrix that mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.mix = nn.Parameter(torch.randn(2, 5, 2)), nn.Parameter(torch.randn(6, 6))

    def features(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 2).transpose(1, 2)  # [N, 2, 6, 2]
        weights = (heads @ self.keys.mT).softmax(-1)
        read = torch.bmm(weights.flatten(0, 1), self.keys.repeat(len(x), 1, 1))
        return torch.matmul(self.mix, read.view_as(heads).transpose(1, 2).flatten(2))


class Windows(Model):
    """Three windows of two tokens in each example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.conv, self.shift = nn.Conv1d(2, 2, 3, padding="valid"), nn.Parameter(torch.randn(2, 1))

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(x, inplace=True)
        windows = x.reshape(-1, 2, 4)
        mixed: Tensor = self.norm(self.layer(windows + self.shift)).view_as(x)
        return mixed + torch.as_tensor(self.conv(windows)).sum(2).view(len(x), 6, 1)


class Adapted(Model):
    """A weight of low rank, changed in place and added to a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 1))
        self.last = nn.Parameter(torch.randn(4))

    def features(self, x: Tensor) -> Tensor:
        weight = self.up @ self.down
        weight[0] += self.last
        return F.linear(x, self.layer.weight + 0.5 * weight)


class Standardized(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True)
        return F.conv1d(x, weight.view_as(self.weight), self.bias, padding=1)


class Convolved(Model):
    """Convolutions of one to three dimensions, transposed ones, and weights that are normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = Standardized(6, 6, 3), weight_norm(nn.Conv1d(6, 8, 3, padding=1, groups=2))
        self.conv3 = nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1), bias=False)
        self.up1, self.up2 = nn.ConvTranspose1d(6, 4, 2), nn.ConvTranspose2d(4, 4, 2, 2, output_padding=1, groups=2)
        self.up3 = nn.ConvTranspose3d(3, 2, 2, dilation=2)

    def features(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x))
        volume = self.up3(self.conv3(x.view(len(x), 2, 2, 2, 4))).flatten(1).view(len(x), 6, -1)
        plane = self.up2(self.up1(volume)[..., :16].reshape(len(x), 4, 4, 4))
        features: Tensor = plane.flatten(2)[..., :4]
        return features


class Filled(Model):
    """Powers, thresholds, what fills masks, and a weight that rows are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.fill, self.slope = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(())), nn.PReLU(6)
        self.low, self.rows = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(2, 4))

    def features(self, x: Tensor) -> Tensor:
        table = torch.zeros(4, 4, dtype=x.dtype)
        table[1:3] = self.rows
        x = self.slope(x).masked_fill(x > self.low + torch.eye(4)[0], self.fill)
        return F.linear((1 + x**2) ** self.power, table, self.rows[0])


class Quantized(Model):
    """Straight-through gradients, a weight of norm one, and a weight that a network computes from constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hyper = spectral_norm(nn.Linear(4, 4)).eval(), nn.Linear(3, 16)

    def features(self, x: Tensor) -> Tensor:
        weight = self.first.weight + (self.first.weight.sign() - self.first.weight).detach()
        x = F.linear(self.layer(x), weight, self.first.bias)
        return F.linear(x, self.hyper(torch.ones(1, 3, dtype=x.dtype)).view(4, 4))


class Unusual(Model):
    """Complex weights, instance-norm, and convolutions whose output is as large as their input."""

    def __init__(self) -> None:
        super().__init__()
        self.complex, self.norm = nn.Parameter(torch.randn(4, 4, 2)), nn.InstanceNorm1d(6, affine=True)
        self.even = nn.Conv1d(6, 6, 2, padding="same")
        self.odd = nn.Conv2d(1, 1, (3, 4), padding="same", dilation=(1, 3))

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(F.linear(torch.complex(x, x.cos()), torch.view_as_complex(self.complex)).abs())
        features: Tensor = self.odd(self.even(x)[:, None])[:, 0]
        return features


class Crossed(Model):
    """Queries that all examples share, and keys and values of other features."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.wide = nn.Parameter(torch.randn(1, 5, 4)), nn.Linear(4, 6)
        self.pool = nn.MultiheadAttention(4, 2, batch_first=True)
        self.read = nn.MultiheadAttention(4, 2, bias=False, kdim=6, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        pooled = self.pool(self.queries.expand(len(x), -1, -1), x, x)[0]
        read: Tensor = self.read(x, self.wide(pooled), pooled, need_weights=False)[0]
        return read


MODELS: list[Callable[[], Model]] = [
    *(Tokens, Rescaled, Biased, Heads, Windows, Adapted, Convolved, Filled, Quantized, Unusual, Crossed)
]


def losses_of(logits: Tensor, sizes: list[int]) -> list[Tensor]:
    targets = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return [F.mse_loss(rows, of) for rows, of in zip(logits.split(sizes), targets.split(sizes), strict=True)]  # type: ignore[no-untyped-call]


def recorded(model: nn.Module, x: Tensor, sizes: list[int], mask: Mask) -> dict[str, Tensor | None]:
    model.zero_grad()
    with sandmask.record(model, sizes) as recording:
        logits = model(x)
    recording.backward(losses_of(logits, sizes), mask)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mask", [ANDMask(0.4), SANDMask(0.1), GeometricMean(0.6)], ids=repr)
@pytest.mark.parametrize("build", MODELS)
def test_gradients_are_those_of_separate_losses(build: Callable[[], Model], mask: Mask, sizes: list[int]) -> None:
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(sum(sizes), 6, 4, dtype=torch.float64)
    losses = losses_of(model(x), sizes)
    sandmask.backward(losses, model.named_parameters(), mask)
    expected = {name: p.grad for name, p in model.named_parameters()}
    for _ in range(2):  # the first time, examples are checked
        torch.testing.assert_close(recorded(model, x, sizes, mask), expected)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("build", MODELS)
def test_one_pass_gives_all_environments(build: Callable[[], Model]) -> None:
    torch.manual_seed(0)
    model, batches = build().double(), [(torch.randn(n, 6, 4).double(), torch.randn(n, 3).double()) for n in (4, 5, 2)]
    expected = environment_gradients(model, F.mse_loss, batches, "loop")
    torch.testing.assert_close(environment_gradients(model, F.mse_loss, batches, "batched"), expected)


class OfTime(Model):
    """Tokens come first, and the examples of a token next to each other."""

    def features(self, x: Tensor) -> Tensor:
        return F.linear(x.transpose(0, 1).flatten(0, 1), self.first.weight).view(6, -1, 4).transpose(0, 1)


class Positions(Model):
    """Of as many tokens as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 4)

    def features(self, x: Tensor) -> Tensor:
        placed: Tensor = x + self.places(torch.arange(x.shape[1]))
        return placed


class ChangedLater(Adapted):
    """What is computed from parameters is changed after its use."""

    def features(self, x: Tensor) -> Tensor:
        weight = self.last * 2
        x = x + weight[None]
        weight *= self.down[0]
        return x + weight


class Binary(Model):
    """A weight that is computed by a function of its own."""

    def features(self, x: Tensor) -> Tensor:
        return F.linear(x, Signs.apply(self.first.weight), self.first.bias)  # type: ignore[no-untyped-call]


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class OneBias(Adapted):
    def features(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first.weight, self.last[:1])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (OfTime, "independently"),
        (lambda: nn.GRU(4, 4), "used by gru"),
        (ChangedLater, "changed in place"),
        (Binary, "cannot be tracked"),
        (OneBias, r"shape \(1,\) is broadcast"),
    ],
)
def test_what_is_not_known_is_refused(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(MaskError, match=rf"cannot be recorded: .*{reason}.*separate forward passes"):
        recorded(build(), torch.randn(8, 6, 4), [4, 4], ANDMask(1.0))


def test_as_many_positions_as_examples_are_noticed_later_too() -> None:
    """The layer then seems to have a position for each example."""
    model = Positions()
    recorded(model, torch.randn(8, 6, 4), [4, 4], ANDMask(1.0))
    with pytest.raises(MaskError, match="independently"):
        recorded(model, torch.randn(8, 8, 4), [4, 4], ANDMask(1.0))
