"""EQRM against a fine grid and finite differences."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import ALGORITHMS, Problem
from sandmask.algorithms.eqrm import quantile
from sandmask.errors import SandmaskError

MakeHparams = Callable[..., dict[str, Tensor]]


def naive_quantile(risks: list[float], alpha: float) -> float:
    """By halving an interval that surely has it, in plain Python."""
    width = 1.06 * float(np.std(risks, ddof=1)) / math.pow(len(risks), 0.2)
    low, high = min(risks) - 9 * width, max(risks) + 9 * width
    for _ in range(80):
        middle = (low + high) / 2
        mass = sum(NormalDist(risk, width).cdf(middle) for risk in risks) / len(risks)
        low, high = (low, middle) if mass > alpha else (middle, high)
    return low


RISKS = [0.3, 1.1, 0.7, 2.0]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.75, 0.99])
def test_value_and_gradient_are_those_of_the_quantile(alpha: float) -> None:
    risks = torch.tensor(RISKS, dtype=torch.float64, requires_grad=True)
    value = quantile(risks, torch.tensor(alpha, dtype=torch.float64))
    assert value.item() == pytest.approx(naive_quantile(RISKS, alpha), rel=1e-9)
    (gradient,) = torch.autograd.grad(value, risks)
    for e in range(4):
        higher, lower = RISKS.copy(), RISKS.copy()
        higher[e] += 1e-5
        lower[e] -= 1e-5
        slope = (naive_quantile(higher, alpha) - naive_quantile(lower, alpha)) / 2e-5
        assert gradient[e].item() == pytest.approx(slope, abs=1e-6)
    assert gradient.sum().item() == pytest.approx(1.0)  # risks that rise together


def test_a_negative_quantile_is_next_to_one() -> None:
    width = 1.06 * float(np.std(RISKS, ddof=1)) * 4**-0.2
    value = quantile(torch.tensor(RISKS, dtype=torch.float64), torch.tensor(-50.0))
    assert value.item() == pytest.approx(float(np.mean(RISKS)) + width * 10)


def test_equal_risks_have_a_finite_gradient() -> None:
    risks = torch.full((3,), 0.7, requires_grad=True)
    for alpha in (0.75, -10.0):
        (gradient,) = torch.autograd.grad(quantile(risks, torch.tensor(alpha)), risks)
        torch.testing.assert_close(gradient, torch.full((3,), 1 / 3))


@pytest.mark.parametrize("burn_in", [2.0, 1.4])
def test_trains_like_the_mean_and_then_the_quantile(
    burn_in: float, hparams_of: MakeHparams, assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        if step < 2:
            return (risks[0] + risks[1] + risks[2]) / 3
        known = [risk.item() for risk in risks]
        loss = torch.tensor(naive_quantile(known, 0.9), dtype=torch.float64)
        for e in range(3):  # the gradient by finite differences, of the fourth order
            slope = 0.0
            for shift, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
                moved = [risk + 3e-4 * shift * (i == e) for i, risk in enumerate(known)]
                slope += weight * naive_quantile(moved, 0.9) / (12 * 3e-4)
            loss = loss + slope * (risks[e] - known[e])
        return loss

    hparams = hparams_of("EQRM", eqrm_quantile=0.9, eqrm_burnin_iters=burn_in, eqrm_lr=1e-3)
    assert_minimizes("EQRM", hparams, naive, reset_at=2, later_lr=1e-3)


def test_one_environment_is_too_few(problem: Problem) -> None:
    with pytest.raises(SandmaskError, match="at least 2"):
        ALGORITHMS["EQRM"].build(Problem(problem.featurizer, 1, 2, (5,)))
