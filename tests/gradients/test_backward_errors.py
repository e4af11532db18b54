"""What can be wrong with losses, parameters and gradients; nothing is written to `.grad` then."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sandmask
from sandmask.masks import ANDMask, MaskError, MaskWarning, _errors


def weights() -> Tensor:
    return torch.ones(2, requires_grad=True)


def mistakes() -> list[tuple[str, Any, Any, str]]:
    w = weights()
    loss = (w * w).sum()
    return [
        ("one environment", [loss], [w], "The number of environments should be at least 2"),
        ("one in a tensor", loss[None], [w], "Found 1."),
        ("one in a generator", iter([loss]), [w], "Found 1."),
        ("none", [], [w], "Found 0."),
        ("a scalar", loss, [w], "a tensor [E] of one loss per environment"),
        ("nothing", None, [w], "Found NoneType."),
        ("a dict", {"a": loss, "b": loss}, [w], "pass its `.values()`"),
        ("not a scalar", [w * 2, w * 2], [w], "The loss of environment 0 should be a scalar. Found shape (2,)."),
        ("no graph", [loss, torch.ones(())], [w], "The loss of environment 1 should depend on a parameter"),
        ("no tensor", [loss, 1.0], [w], "The loss of environment 1 should be a tensor. Found float."),
        ("no micro-batch", [loss, []], [w], "Environment 1 should have at least one loss"),
        ("a module", [loss, loss], nn.Linear(1, 1), "Pass `model.named_parameters()`"),
        ("a tensor", [loss, loss], w, "Pass `[tensor]`"),
        ("no parameter", [loss, loss], [], "create a new one for each call"),
        ("all frozen", [loss, loss], [w.detach()], "at least one tensor that requires a gradient"),
        ("no leaf", [loss, loss], [w * 1], "should be a leaf"),
        ("something else", [loss, loss], ["w"], "Found str at position 0."),
        ("another model's", [loss, loss], [weights()], "No loss depends on any of the tensors in `params`"),
    ]


@pytest.mark.parametrize("mistake", range(len(mistakes())), ids=[name for name, *_ in mistakes()])
def test_mistakes(mistake: int) -> None:
    _, losses, params, message = mistakes()[mistake]
    with pytest.raises(MaskError, match=re.escape(message)):
        sandmask.backward(losses, params, ANDMask(1.0))


def test_a_mask_that_is_none_is_refused() -> None:
    w = weights()
    losses = [w.sum(), w.sum()]
    with pytest.raises(MaskError, match="Found the class ANDMask: call it"):
        sandmask.backward(losses, [w], ANDMask)  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="Found list"):
        sandmask.set_gradients([("w", w)], [w], sandmask.GradientMoments())  # type: ignore[arg-type]
    assert w.grad is None


@pytest.mark.parametrize(("named", "name"), [(True, "`second`"), (False, re.escape("parameter 1 of shape (2,)"))])
def test_a_gradient_that_is_not_finite_is_named(named: bool, name: str) -> None:
    first, second = weights(), weights()
    losses = [first.sum() + second.sum(), first.sum() + (second * torch.tensor([1.0, float("inf")])).sum()]
    params: Any = {"first": first, "second": second}.items() if named else [first, second]
    with pytest.raises(MaskError, match=f"The gradient of {name} in environment 1 should be finite. Found inf"):
        sandmask.backward(losses, params, ANDMask(1.0))
    assert first.grad is None
    assert second.grad is None


def test_an_environment_without_examples_is_named() -> None:
    """The loss of an empty batch is NaN, but its gradients are zeros, which would count as disagreement."""
    model, sizes = nn.Linear(2, 3), (4, 0, 4)
    losses = [nn.functional.cross_entropy(model(torch.randn(n, 2)), torch.zeros(n).long()) for n in sizes]
    with pytest.raises(
        MaskError, match=r"The loss of environment 1 should be finite. Found nan. If its batch is empty"
    ):
        sandmask.backward(losses, model.named_parameters(), ANDMask(1.0))
    assert model.weight.grad is None


def test_the_check_can_be_left_out() -> None:
    w = weights()
    sandmask.backward([w.sum() * float("nan"), w.sum()], [w], ANDMask(0.0), check_finite=False)
    assert w.grad is not None
    assert not w.grad.isfinite().any()


def test_an_embedding_with_sparse_gradients_is_refused_with_advice() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    losses = [embedding(torch.tensor([e])).sum() for e in range(2)]
    with pytest.raises(MaskError, match="sparse=False"):
        sandmask.backward(losses, embedding.named_parameters(), ANDMask(1.0))


def test_models_with_the_same_names_are_told_apart() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    losses = [b(a(torch.ones(1, 1))).sum() for _ in range(2)]
    report = sandmask.backward(losses, [*a.named_parameters(), *b.named_parameters()], ANDMask(1.0))
    assert list(report.per_tensor) == ["weight", "bias", "weight (2)", "bias (2)"]


@pytest.fixture
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_errors, "_warned", set())


def mask_step(model: nn.Module) -> None:
    losses = (model(torch.randn(4, 3, 5)).square().mean() for _ in range(2))
    sandmask.backward(losses, model.parameters(), ANDMask(1.0))


@pytest.mark.usefixtures("_forget_warnings")
def test_batchnorm_in_training_mode_is_warned_of_once() -> None:
    with pytest.warns(MaskWarning, match="freeze_batchnorm") as caught:
        mask_step(nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU()))
    assert [warning.filename for warning in caught] == [__file__]
    mask_step(nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)))


@pytest.mark.usefixtures("_forget_warnings")
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4).eval(),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.GroupNorm(2, 4),
        sandmask.freeze_batchnorm(nn.BatchNorm1d(4)).train(),
    ],
    ids=repr,
)
def test_what_keeps_examples_apart_is_not_warned_of(norm: nn.Module) -> None:
    mask_step(nn.Sequential(nn.Conv1d(3, 4, 1), norm))
