"""A report's histogram of agreement, and the callback that gets reports."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sandmask
from sandmask.masks import ANDMask, MaskError, SANDMask


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
        dist.destroy_process_group()
    assert seen == [report]
