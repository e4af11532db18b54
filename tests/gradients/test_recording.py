"""A recorded forward pass gives what separate forward passes give, and mistakes in its use are named."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sandmask
from sandmask.masks import ANDMask, GeometricMean, Mask, MaskError, SANDMask

MASKS = [ANDMask(0.6), SANDMask(0.1, rescale="sparsity"), GeometricMean(0.6)]


class Sentences(nn.Module):
    """Token and position embeddings, and a head that is used twice; `unused` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8, padding_idx=0), nn.Embedding(5, 8)
        self.head, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1])[None])
        x = x + self.head(x).mean(2, keepdim=True)
        logits: Tensor = self.head(F.layer_norm(x, (8,)).mean(1))
        return logits


class Attention(nn.Module):
    """Torch's own self-attention, with masks of all shapes, without weights and with them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.MultiheadAttention(8, 2, batch_first=True)
        for attention in (self.layer.self_attn, self.last):  # the gradient of a key's bias is zero but for rounding
            attention.in_proj_bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        earlier = nn.Transformer.generate_square_subsequent_mask(5)
        absent = torch.where(ids == 0, -torch.inf, 0.0)
        x = self.layer(self.words(ids), earlier, src_key_padding_mask=absent)
        mixed, weights = self.last(x, x, x, attn_mask=earlier.expand(2 * len(ids), 5, 5))
        logits: Tensor = self.head(mixed[:, -1]) * weights[:, :, :1].sum(1)
        return logits


class Beside(nn.Module):
    """A layer's output next to its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def narrow() -> nn.Module:
    """Layers of few features or none."""
    norm = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.LayerNorm([4, 1]), nn.Flatten(), nn.Linear(4, 1))
    return nn.Sequential(nn.Linear(4, 4), norm, Beside(nn.Linear(1, 0)), nn.Linear(1, 3))


def depthwise() -> nn.Module:
    """In channels-last order, with layer-norm over all of it."""
    first = nn.Sequential(
        nn.Conv2d(1, 4, 1, bias=False), nn.Conv2d(4, 8, 3, groups=4, dilation=1), nn.LayerNorm([8, 2, 2])
    )
    last = nn.Sequential(nn.PixelShuffle(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(32, 3))
    model: nn.Module = nn.Sequential(first, last).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 4)),
    "convnet": (convnet, lambda n: torch.randn(n, 1, 4, 4)),
    "narrow": (narrow, lambda n: torch.randn(n, 4)),
    "depthwise": (depthwise, lambda n: torch.randn(n, 1, 4, 4).contiguous(memory_format=torch.channels_last)),
    "sentences": (Sentences, lambda n: torch.randint(0, 9, (n, 5))),
    "attention": (Attention, lambda n: torch.randint(0, 9, (n, 5)).index_fill(1, torch.tensor(0), 1)),
}


def make(case: str, sizes: list[int]) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    build, draw = CASES[case]
    return build(), draw(sum(sizes)), torch.randint(0, 3, (sum(sizes),))


def losses_of(logits: Tensor, y: Tensor, sizes: list[int]) -> list[Tensor]:
    return [F.cross_entropy(rows, of) for rows, of in zip(logits.split(sizes), y.split(sizes), strict=True)]  # type: ignore[no-untyped-call]


def recorded(case: str, sizes: list[int], mask: Mask, **options: Any) -> tuple[nn.Module, sandmask.MaskReport]:
    model, x, y = make(case, sizes)
    with sandmask.record(model, sizes) as recording:
        logits = model(x)
    return model, recording.backward(losses_of(logits, y, sizes), mask, **options)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("sizes", [[6, 6, 6], [5, 2, 7, 4]])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_separate_passes(case: str, mask: Mask, sizes: list[int]) -> None:
    model, report = recorded(case, sizes, mask)
    twin, x, y = make(case, sizes)
    losses = (F.cross_entropy(twin(rows), of) for rows, of in zip(x.split(sizes), y.split(sizes), strict=True))  # type: ignore[no-untyped-call]
    expected = sandmask.backward(losses, twin.named_parameters(), mask)
    torch.testing.assert_close(gradients(model), gradients(twin), rtol=1e-3, atol=1e-6)
    assert report.environments == expected.environments == len(sizes)
    assert list(report.per_tensor) == list(expected.per_tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["mlp", "convnet"])
def test_normalization_may_be_in_float32(case: str, dtype: torch.dtype) -> None:
    """In a model whose other layers are not."""
    found = []
    for sizes in ([6, 6, 6], [5, 6, 7]):
        model, x, y = make(case, sizes)
        model.to(dtype)[1].float()
        with sandmask.record(model, sizes) as recording:
            logits = model(x.to(dtype))
        assert logits.dtype == dtype
        recording.backward(losses_of(logits, y, sizes), ANDMask(0.0))
        found.append(gradients(model))
        model.zero_grad()
        sandmask.backward(losses_of(model(x.to(dtype)), y, sizes), model.named_parameters(), ANDMask(0.0))
        torch.testing.assert_close(found[-1], gradients(model), rtol=0.05, atol=0.01)


def test_a_scaler_changes_nothing() -> None:
    plain, _ = recorded("mlp", [6, 6, 6], SANDMask(0.1))
    model, _ = recorded("mlp", [6, 6, 6], SANDMask(0.1), scaler=GradScaler("cpu", init_scale=64.0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad / 64, q.grad)


def test_sizes_may_change_from_step_to_step() -> None:
    model, x, y = make("mlp", [6, 6, 6])
    for sizes in ([6, 6, 6], [10, 2, 6], [6, 12]):
        with sandmask.record(model, sizes) as recording:
            logits = model(x)
        assert recording.backward(losses_of(logits, y, sizes), ANDMask(0.6)).environments == len(sizes)


def test_reports_are_handed_over() -> None:
    reports: list[sandmask.MaskReport] = []
    _, report = recorded("mlp", [4, 4], ANDMask(1.0), on_report=reports.append)
    assert reports == [report]


@pytest.mark.parametrize("sizes", [[], [4], [4, 0]])
def test_sizes_are_checked(sizes: list[int]) -> None:
    with pytest.raises(MaskError, match="`sizes`"):
        sandmask.record(mlp(), sizes)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nc,c->n", x, self.scale)


class WithZeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, add_zero_attn=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x[None], x[None], x[None])[0]
        return mixed


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Summed(), "a parameter is used by einsum"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "statistics"),
        (WithZeros(), "other keys and values"),
    ],
)
def test_models_that_cannot_be_recorded_are_refused(model: nn.Module, reason: str) -> None:
    message = rf"cannot be recorded: .*{reason}.*separate forward passes"
    with pytest.raises(MaskError, match=message), sandmask.record(model, [2, 2]):
        model(torch.randn(4, 4))
    assert torch.ones(2).sum() == 2  # nothing is recorded any more


@pytest.mark.parametrize("mistake", ["no backward pass", "an error in the block", "too few losses"])
def test_a_forward_pass_that_is_given_up_is_freed(mistake: str) -> None:
    model, x, y = make("mlp", [4, 4])
    kept: list[ref[Tensor]] = []
    model[0].register_forward_hook(lambda _, __, output: kept.append(ref(output)))
    with suppress(ZeroDivisionError, MaskError), sandmask.record(model, [4, 4]) as recording:
        logits = model(x)
        if mistake == "an error in the block":
            raise ZeroDivisionError
        if mistake == "too few losses":
            recording.backward(losses_of(logits, y, [4, 4])[:1], ANDMask(1.0))
    del recording, logits
    assert kept[0]() is None


@pytest.mark.parametrize("mask", [ANDMask(1.0), GeometricMean(0.5)], ids=repr)
def test_outputs_keep_no_gradients(mask: Mask) -> None:
    """They keep the tape."""
    model, x, y = make("mlp", [4, 4])
    with sandmask.record(model, [4, 4]) as recording:
        logits = model(x)
    tape: Any = recording._tape
    recording.backward(losses_of(logits, y, [4, 4]), mask)
    assert tape.used() == {}
    assert "folding" not in vars(tape)


def test_mistakes_are_named() -> None:
    sizes = [4, 4, 4]
    model, x, y = make("mlp", sizes)
    with sandmask.record(model, sizes) as recording:
        logits = model(x)
    losses = losses_of(logits, y, sizes)
    with pytest.raises(MaskError, match=r"3 environments.*Found 2"):
        recording.backward(losses[:2], ANDMask(1.0))
    recording.backward(losses, ANDMask(1.0))
    with pytest.raises(MaskError, match="Record another one"):
        recording.backward(losses, ANDMask(1.0))
    with pytest.raises(MaskError, match="used once"), recording:
        pass


def test_a_checkpoint_is_an_error() -> None:
    """It computes its layers again, out of sight. Square weights make what they save look alike."""
    sizes, first, second = [4, 4], nn.Linear(4, 4), nn.Linear(4, 4)
    with sandmask.record(nn.Sequential(first, second), sizes) as recording:
        logits = checkpoint(second, first(torch.randn(8, 4)), use_reentrant=False)
    with pytest.raises(MaskError, match=r"cannot be recorded: .*`torch.utils.checkpoint`"):
        recording.backward(losses_of(logits, torch.zeros(8).long(), sizes), ANDMask(1.0))


@pytest.mark.parametrize("apart", [0, 1])
def test_losses_that_mix_environments_are_an_error(apart: int) -> None:
    """All environments, or only those after the first."""
    sizes = [4] * (apart + 2)
    model, x, y = make("mlp", sizes)
    with sandmask.record(model, sizes) as recording:
        logits = model(x)
    parts = [slice(4)] * apart + [slice(4 * apart, None, 2), slice(4 * apart + 1, None, 2)]
    losses = [F.cross_entropy(logits[rows], y[rows]) for rows in parts]
    with pytest.raises(MaskError, match="independently"):
        recording.backward(losses, ANDMask(1.0))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_are_not_finite_are_an_error() -> None:
    sizes = [4, 4]
    model, x, y = make("mlp", sizes)
    with sandmask.record(model, sizes) as recording:
        logits = model(x)
    first, second = losses_of(logits, y, sizes)
    with pytest.raises(MaskError, match=r"should be finite.*environment 1"):
        recording.backward([first, second * float("inf")], ANDMask(1.0))


def test_a_model_outside_of_the_block_is_an_error() -> None:
    sizes = [4, 4]
    model, x, y = make("mlp", sizes)
    with sandmask.record(model, sizes) as recording:
        pass
    with pytest.raises(MaskError, match="in the `with` block"):
        recording.backward(losses_of(model(x), y, sizes), ANDMask(1.0))


@pytest.mark.parametrize("case", ["mlp", "sentences"])
def test_sizes_that_are_not_those_of_the_input_are_an_error(case: str) -> None:
    model, x, y = make(case, [4, 3])
    with sandmask.record(model, [4, 4]) as recording:
        logits = model(x)
    with pytest.raises(MaskError, match="row for each of the 8 examples"):
        recording.backward(losses_of(logits, y, [4, 3]), ANDMask(1.0))


def test_an_ordinary_backward_pass_through_a_recording_is_an_error() -> None:
    model, x, _ = make("mlp", [4, 4])
    with sandmask.record(model, [4, 4]):
        output = model(x).sum()
    with pytest.raises(MaskError, match=r"recording\.backward"):
        output.backward()
    assert all(p.grad is None for p in model.parameters())
