"""Reports of what a mask did, and their histograms of agreement."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sandmask
from sandmask.gradients import _report
from sandmask.masks import ANDMask, GradientMoments, Mask, MaskError, SANDMask
from sandmask.masks._base import evaluate
from sandmask.training.processes import leave_group


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


def losses_of(model: nn.Module, n_envs: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 3, generator=generator), torch.randint(0, 2, (6,), generator=generator)) for _ in range(n_envs)
    ]
    return [F.cross_entropy(model(x), y) for x, y in batches]


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("bins", [1, 4, 10])
def test_shares_are_those_of_a_loop_over_elements(model: nn.Module, bins: int) -> None:
    report = sandmask.backward(losses_of(model), model.named_parameters(), ANDMask(0.5))
    everything = [0] * bins
    for name, param in model.named_parameters():
        gradients = torch.stack([torch.autograd.grad(loss, param)[0] for loss in losses_of(model)])
        counts = [0] * bins
        for total in gradients.sign().sum(0).flatten().tolist():
            counts[min(abs(int(total)) * bins // 5, bins - 1)] += 1
        everything = [a + b for a, b in zip(everything, counts, strict=True)]
        assert report.agreement_histogram(bins, name) == [count / param.numel() for count in counts]
    shares = report.agreement_histogram(bins)
    assert shares == [count / sum(everything) for count in everything]
    assert sum(shares) == pytest.approx(1)
    assert report.agreement_histogram(bins) == shares, "the moments are gone, and it can still be asked"


def test_what_cannot_be_asked(model: nn.Module) -> None:
    report = sandmask.backward(losses_of(model), model.named_parameters(), ANDMask(0.5))
    with pytest.raises(MaskError, match=r"should be one of 0.weight, .* Found `tensor` = 'middle'"):
        report.agreement_histogram(tensor="middle")
    with pytest.raises(MaskError, match="`bins` should be at least 1"):
        report.agreement_histogram(0)


def test_what_is_not_a_number_has_no_sign() -> None:
    w = torch.ones(2, requires_grad=True)
    weights = [torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])]
    report = sandmask.backward([(w * each).sum() for each in weights], [w], ANDMask(0.5), check_finite=False)
    assert report.agreement_histogram(4) == [0, 0, 0.5, 0.5]


def test_the_callback_gets_the_report_once_gradients_are_there(model: nn.Module) -> None:
    seen: list[tuple[sandmask.MaskReport, bool]] = []

    def callback(report: sandmask.MaskReport) -> None:
        seen.append((report, all(param.grad is not None for param in model.parameters())))

    report = sandmask.backward(losses_of(model), model.named_parameters(), SANDMask(0.2), on_report=callback)
    assert seen == [(report, True)]
    assert report._pending is not None, "it was not read, so nothing was computed"


def test_the_callback_of_several_processes(model: nn.Module, tmp_path: Path) -> None:
    seen: list[sandmask.MaskReport] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        report = sandmask.distributed.backward(
            losses_of(model), model.named_parameters(), SANDMask(0.2), on_report=seen.append
        )
    finally:
        leave_group()
    assert seen == [report]
