"""`sandmask.backward` where graphs are shared, kept, compiled, checkpointed or hooked."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import sandmask
from sandmask.masks import ANDMask, MaskError, SANDMask

MASK = SANDMask(0.2)
X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def losses_of(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [model(x).square().mean() for x in X]


def shared(model: nn.Module) -> list[Tensor]:
    """The same losses from one forward pass."""
    return [rows.square().mean() for rows in model(X.flatten(0, 1)).view(3, 4, -1)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


@pytest.fixture
def expected() -> list[Tensor]:
    model = make_model()
    each = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses_of(model)]
    return MASK([torch.stack(grads) for grads in zip(*each, strict=True)])


def test_the_values_of_a_dict_may_share_a_graph(expected: list[Tensor]) -> None:
    model = make_model()
    sandmask.backward(dict(enumerate(shared(model))).values(), model.parameters(), MASK)
    torch.testing.assert_close(gradients(model), expected)


def test_a_generator_of_losses_that_share_a_graph_is_told_to_be_a_list() -> None:
    model = make_model()
    with pytest.raises(MaskError, match="should be in a list"):
        sandmask.backward(iter(shared(model)), model.parameters(), MASK)
    assert gradients(model) == [None] * 4


def test_graphs_are_kept_for_another_call_if_asked_for(expected: list[Tensor]) -> None:
    model = make_model()
    losses = losses_of(model)
    sandmask.backward(losses, model[0].parameters(), MASK, retain_graph=True)
    sandmask.backward(losses, model[2].parameters(), MASK)
    torch.testing.assert_close(gradients(model), expected)
    with pytest.raises(MaskError, match="retain_graph=True"):
        sandmask.backward(losses, model[0].parameters(), MASK)


def test_heads_of_single_environments_may_have_ordinary_gradients() -> None:
    body, heads = nn.Linear(5, 7), nn.ModuleList(nn.Linear(7, 1) for _ in X)
    losses = [head(body(x)).square().mean() for head, x in zip(heads, X, strict=True)]
    expected = [*torch.autograd.grad(sum(losses), [*heads.parameters()], retain_graph=True)]
    sandmask.backward(losses, body.parameters(), MASK, retain_graph=True)
    assert gradients(heads) == [None] * 6
    torch.autograd.backward(losses, inputs=[*heads.parameters()])
    torch.testing.assert_close(gradients(heads), expected)


@pytest.mark.parametrize("form", [list, torch.stack, iter])
def test_it_may_be_called_without_gradients(form: Any, expected: list[Tensor]) -> None:
    model = make_model()
    losses = form(losses_of(model))
    with torch.no_grad():
        sandmask.backward(losses, model.parameters(), MASK)
        assert not torch.is_grad_enabled()
    torch.testing.assert_close(gradients(model), expected)


def test_hooks_after_accumulation_are_called_once_all_is_written(expected: list[Tensor]) -> None:
    model, seen = make_model(), []

    def note(param: Tensor) -> None:
        assert param.grad is not None
        assert model[2].bias.grad is not None
        seen.append(param.grad.clone())

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    sandmask.backward(losses_of(model), model.parameters(), MASK)
    torch.testing.assert_close(seen, expected)


def test_hooks_may_remove_themselves() -> None:
    w = torch.ones(1, requires_grad=True)
    calls: list[int] = []
    handles: list[RemovableHandle] = []
    for number in range(2):

        def once(_: Tensor, number: int = number) -> None:
            calls.append(number)
            handles[number].remove()

        handles.append(w.register_post_accumulate_grad_hook(once))  # type: ignore[no-untyped-call]
    for _ in range(2):
        sandmask.backward([w.sum(), w.sum()], [w], ANDMask(1.0))
    assert calls == [0, 1]


def test_hooks_of_parameters_see_each_environment() -> None:
    w = torch.ones(1, requires_grad=True)
    w.register_hook(lambda grad: grad.clamp(max=1))  # type: ignore[no-untyped-call]
    sandmask.backward([w.sum() * 3, w.sum() * 0.5], [w], ANDMask(1.0))
    assert w.grad is not None
    assert w.grad.item() == 0.75


def test_a_reentrant_checkpoint_would_hide_its_parameters() -> None:
    model = make_model()

    def half_hidden(x: Tensor) -> Tensor:
        out: Tensor = model[2](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))
        return out

    for _ in range(2):
        with pytest.raises(MaskError, match="use_reentrant=False"):
            sandmask.backward([half_hidden(x.clone()).sum() for x in X], model.parameters(), MASK)


def test_a_compiled_model(expected: list[Tensor]) -> None:
    model = make_model()
    compiled = torch.compile(model, backend="aot_eager")
    losses_of(compiled)[0].backward()  # type: ignore[no-untyped-call]  # compiled for a graph that is not kept
    model.zero_grad()
    sandmask.backward((compiled(x).square().mean() for x in X), model.parameters(), MASK)
    torch.testing.assert_close(gradients(model), expected)
    with pytest.raises(MaskError, match="Pass a generator of losses"):
        sandmask.backward(losses_of(compiled), model.parameters(), MASK)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # read by dynamo
def test_a_compiled_loss_of_a_recorded_model() -> None:
    model = make_model()
    loss = torch.compile(lambda rows: rows.tanh().exp().mean(), backend="aot_eager")
    loss(model(X[0])).backward()  # compiled for a graph that is not kept
    model.zero_grad()
    with sandmask.record(model, [4, 4, 4]) as recording:
        outputs = model(X.flatten(0, 1))
    with pytest.raises(MaskError, match="Pass a generator of losses"):
        recording.backward([loss(rows) for rows in outputs.split(4)], MASK)


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_a_model_of_lightning_fabric() -> None:
    """In mixed precision, its outputs accept backward passes of Fabric only."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = fabric.setup_module(make_model())
    with pytest.raises(MaskError, match=r"model\.module\(x\)"):
        sandmask.backward(losses_of(model), model.named_parameters(), MASK)
    with sandmask.record(model, [4, 4, 4]) as recording:
        losses = shared(model)
    with pytest.raises(MaskError, match=r"model\.module\(x\)"):
        recording.backward(losses, MASK)
    with fabric.autocast():
        sandmask.backward(losses_of(model.module), model.named_parameters(), MASK)
    assert None not in gradients(model)


def test_complex_parameters_are_refused_with_a_scaler_too() -> None:
    w = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    for scaler in (None, GradScaler("cpu")):
        with pytest.raises(MaskError, match=re.escape("Found torch.complex64")):
            sandmask.backward([(w * k).abs().sum() for k in (1, 2)], [w], MASK, scaler=scaler)
    assert w.grad is None


def test_complex_parameters_are_refused_in_one_pass_too() -> None:
    model = nn.Linear(5, 3, dtype=torch.complex64)
    with pytest.raises(MaskError, match="view_as_complex"):
        sandmask.record(model, [4, 4])
    with pytest.raises(MaskError, match="view_as_complex"):
        sandmask.environment_moments(model, lambda out, _: out.abs().sum(), [(X[0] + 0j, X[0])] * 2)
