"""Reports of what a mask did."""

import pytest
import torch
from torch import Tensor

import sandmask
from sandmask.gradients import _report
from sandmask.masks import ANDMask, GradientMoments, Mask, SANDMask
from sandmask.masks._base import evaluate


def make_report() -> sandmask.MaskReport:
    a, b = torch.tensor([1.0, 1.0, 1.0, 1.0], requires_grad=True), torch.ones((), requires_grad=True)
    unused, empty = torch.ones(2, requires_grad=True), torch.ones(0, requires_grad=True)
    signs = torch.tensor([[1.0, 1, 1, 0], [1, -1, 1, 0], [1, 1, -1, 1]])
    losses = [(a * row).sum() + b + empty.sum() for row in signs]
    params = {"a": a, "b": b, "unused": unused, "empty": empty}
    return sandmask.backward(losses, params.items(), ANDMask(1.0))


def test_figures() -> None:
    report = make_report()
    assert list(report.per_tensor) == ["a", "b"]
    a, b = report.per_tensor.values()
    assert (a.numel, a.density, a.dead_fraction) == (4, 0.25, 0.75)
    assert a.agreement == pytest.approx((1 + 1 / 3 + 1 / 3 + 1 / 3) / 4)
    assert (b.numel, b.density, b.dead_fraction, b.agreement) == (1, 1, 0, 1)
    assert report.total.numel == 5
    assert report.density == pytest.approx(0.4)
    assert report.dead_fraction == pytest.approx(0.6)
    assert report.agreement == pytest.approx((1 + 1 / 3 + 1 / 3 + 1 / 3 + 1) / 5)
    assert report.environments == 3


def test_dead_means_exactly_zero() -> None:
    w = torch.ones(2, requires_grad=True)
    report = sandmask.backward([w[0] + 1e-3 * w[1], w[0] + w[1]], [w], SANDMask(0.9))
    assert report.dead_fraction == 0
    assert 0.5 < report.density < 1


def test_nothing_is_computed_unread_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[GradientMoments] = []

    def counted(mask: Mask, moments: GradientMoments) -> tuple[list[Tensor], list[Tensor]]:
        calls.append(moments)
        return evaluate(mask, moments)

    monkeypatch.setattr(_report, "evaluate", counted)
    report = make_report()
    assert not calls
    first = report.density
    assert report.density == first
    assert len(report.per_tensor) == 2
    assert len(calls) == 1
    assert report._pending is None


def test_text() -> None:
    report = make_report()
    assert repr(report) == ("MaskReport(3 environments: density 0.400, dead 60.0%, agreement 0.600 (5 elements))")
    assert str(report).splitlines() == [
        "a  density 0.250, dead 75.0%, agreement 0.500 (4 elements)",
        "b  density 1.000, dead 0.0%, agreement 1.000 (1 elements)",
        "total  density 0.400, dead 60.0%, agreement 0.600 (5 elements)",
    ]
