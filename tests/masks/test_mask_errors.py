"""Mistakes are errors that say what was wrong, where, and what to do."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sandmask.errors import SandmaskError
from sandmask.masks import ANDMask, GeometricMean, GradientMoments, MaskError, SANDMask

NAN, INF = float("nan"), float("inf")


def stream(*environments: Any) -> GradientMoments:
    moments = GradientMoments()
    for grads in environments:
        moments.update(grads)
    return moments


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: ANDMask(1.5), "Parameter `tau` should be in [0, 1]. Found `tau` = 1.5."),
    (lambda: ANDMask(-0.1), "Parameter `tau` should be in [0, 1]. Found `tau` = -0.1."),
    (lambda: ANDMask(NAN), "Parameter `tau` should be in [0, 1]. Found `tau` = nan."),
    (lambda: GeometricMean(2), "Parameter `tau` should be in [0, 1]. Found `tau` = 2."),
    (lambda: SANDMask(1.01), "Parameter `tau` should be in [-1, 1]. Found `tau` = 1.01."),
    (lambda: SANDMask(torch.zeros(2)), "Parameter `tau` should be a number. Found `tau` of shape (2,)."),
    (lambda: SANDMask("0.8"), "Parameter `tau` should be a number. Found `tau` = '0.8'."),  # type: ignore[arg-type]
    (lambda: ANDMask(None), "Parameter `tau` should be a number. Found `tau` = None."),  # type: ignore[arg-type]
    (
        lambda: SANDMask(0.5, dispersion="absolute", gain=torch.ones(2)),
        "Parameter `gain` should be a number. Found `gain` of shape (2,).",
    ),
    (lambda: ANDMask(1, rescale="mean"), "Found `rescale` = 'mean'."),  # type: ignore[arg-type]
    (lambda: SANDMask(0, dispersion="x"), "Found `dispersion` = 'x'."),  # type: ignore[arg-type]
    (lambda: SANDMask(0, gain=1.0), "`gain` should be left out"),
    (
        lambda: SANDMask(0, dispersion="absolute", gain=0.0),
        "Parameter `gain` should be positive. Found `gain` = 0.0.",
    ),
    (lambda: ANDMask(1)(torch.ones(1, 3)), "should be at least 2: a mask compares them. Found 1."),
    (lambda: ANDMask(1).from_moments(stream(torch.ones(3))), "should be at least 2"),
    (lambda: ANDMask(1).from_moments(GradientMoments()), "should be at least 2"),
    (lambda: GradientMoments().mean, "Call `update` first"),
    (lambda: ANDMask(1)(torch.tensor(1.0)), "[E, *shape]"),
    (lambda: ANDMask(1)(torch.ones(0, 3)), "[E, *shape]"),
    (lambda: ANDMask(1)([]), "at least one tensor"),
    (lambda: ANDMask(1)("grads"), "Found `grads` of type str"),  # type: ignore[arg-type]
    (lambda: ANDMask(1)([1.0, 2.0]), "The gradient 0 should be a tensor or None. Found float."),  # type: ignore[list-item]
    (lambda: ANDMask(1)([torch.ones(3, 2), torch.ones(2, 2)]), "The gradient 1 should have 3 environments"),
    (lambda: ANDMask(1)(torch.ones(2, 2, dtype=torch.int64)), "Found torch.int64"),
    (lambda: ANDMask(1)(torch.ones(2, 2, dtype=torch.complex64)), "Found torch.complex64"),
    (lambda: ANDMask(1)(torch.ones(2, 2).to_sparse()), "should be dense"),
    (
        lambda: stream({"w": torch.ones(2)}, {"w": torch.ones(3)}),
        "`w` in environment 1 should have shape (2,) on cpu",
    ),
    (lambda: stream({"w": torch.ones(2)}, {"w": torch.ones(2, device="meta")}), "Found (2,) on meta"),
    (
        lambda: stream([torch.ones(2)], [torch.ones(2)] * 2),
        "a sequence of 1 tensors. Found a sequence of 2 tensors.",
    ),
    (lambda: stream([torch.ones(2)], torch.ones(2)), "a sequence of 1 tensors. Found one tensor."),
    (lambda: stream({"w": torch.ones(2)}, {"v": torch.ones(2)}), "Missing: ['w']"),
    (lambda: stream([torch.ones(2)]).merge(stream([torch.ones(2)] * 2)), "of the same tensors"),
    (lambda: stream([torch.ones(2)]).merge(stream([torch.ones(3)])), "should have shape (2,)"),
    (lambda: GradientMoments().merge(GradientMoments(log_magnitude=True)), "Create both in the same way"),
    (lambda: GeometricMean(1).from_moments(stream(*[torch.ones(2)] * 2)), "`mask.new_moments()`"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(MaskError, match=re.escape(message)) as caught:
        mistake()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SandmaskError)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_that_is_not_finite_is_named(bad: float, where: int, dtype: torch.dtype) -> None:
    grads = {"a": torch.randn(4, 3).to(dtype), "b": torch.randn(4, 2, 2).to(dtype), "empty": torch.ones(4, 0)}
    grads["b"][where, 1, 0] = bad
    message = f"The gradient of `b` in environment {where} should be finite"
    with pytest.raises(MaskError, match=message):
        ANDMask(1.0)(grads)
    moments = GradientMoments()
    for e in range(4):
        moments.update({name: grad[e] for name, grad in grads.items()})
    with pytest.raises(MaskError, match=message):
        SANDMask(0.5).from_moments(moments)


def test_a_gradient_that_is_not_finite_is_named_after_merging() -> None:
    good, bad = stream(torch.ones(2), torch.ones(2)), stream(torch.ones(2), torch.tensor([1.0, INF]))
    with pytest.raises(MaskError, match="environment 3 should be finite"):
        ANDMask(1.0).from_moments(good.merge(bad))


def test_the_check_can_be_left_out() -> None:
    grads = torch.tensor([[1.0, 1.0], [1.0, NAN]])
    assert ANDMask(1.0)(grads, check_finite=False)[0].item() == 1
    moments = GradientMoments(check_finite=False).update(grads[0]).update(grads[1])
    assert ANDMask(1.0).from_moments(moments)[0].item() == 1
    assert not moments.mean.isfinite().all()


def test_large_float64_gradients_are_finite() -> None:
    grads = torch.full((2, 3), 1e300, dtype=torch.float64)
    moments = GradientMoments().update([grads[0], torch.ones(1)]).update([grads[1], torch.ones(1)])
    assert ANDMask(1.0).from_moments(moments)[0].tolist() == [1e300] * 3


def test_a_failed_update_changes_nothing() -> None:
    moments = stream([torch.ones(2), torch.ones(3)])
    with pytest.raises(MaskError):
        moments.update([torch.ones(2), torch.ones(4)])
    assert moments.count == 1
    assert moments.mean[0].tolist() == [1, 1]
