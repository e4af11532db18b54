"""Figure 3: the curves are equation 2, and its unreachable part is really out of reach."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmask.masks import ANDMask, SANDMask
from sandmask.paper.figure_3 import and_shape, figure_3, least_dispersion, mask_shape


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("s2", [0.01, 0.5])
def test_curves_are_equation_2(agreement: float, s2: float) -> None:
    ours = float(mask_shape(torch.tensor([agreement], dtype=torch.float64), s2, 0.9))
    assert ours == pytest.approx(max(0.0, math.tanh((agreement - 0.9) / s2)))


def test_without_dispersion_it_is_the_and_mask_but_at_tau_itself() -> None:
    axis = torch.linspace(0, 1, 101, dtype=torch.float64)
    sand, hard = mask_shape(axis, 1e-12, 0.9), and_shape(axis, 0.9)
    differ = axis[sand != hard]
    torch.testing.assert_close(differ, torch.tensor([0.9], dtype=torch.float64))


def test_the_shapes_are_the_masks_of_real_gradients() -> None:
    grads = torch.tensor([[1.0], [2.0], [4.0], [-0.5]], dtype=torch.float64)
    s2 = float(grads.var(0) / grads.mean(0).square())
    expected = SANDMask(tau=0.1).weights(grads)
    torch.testing.assert_close(mask_shape(torch.tensor([0.5], dtype=torch.float64), s2, 0.1), expected)
    assert ANDMask(tau=0.5).weights(grads) == and_shape(torch.tensor([0.5]), 0.5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 10) | st.floats(-10, -0.01), min_size=2, max_size=12))
def test_no_gradients_are_closer_together_than_the_bound(values: list[float]) -> None:
    grads = torch.tensor(values, dtype=torch.float64)
    if grads.mean() == 0:
        return
    agreement = grads.sign().mean().abs()
    s2 = grads.var() / grads.mean().square()
    assert s2 >= least_dispersion(agreement, len(values)) - 1e-9


def test_the_bound_is_approached() -> None:
    grads = torch.tensor([1.0, 1.0, 1.0, -1e-9], dtype=torch.float64)
    s2 = grads.var() / grads.mean().square()
    assert float(s2) == pytest.approx(float(least_dispersion(torch.tensor(0.5), 4)), rel=1e-6)


def test_the_figure_has_its_parts() -> None:
    product = figure_3(quick=True)
    assert set(product.data["figure-3"].kind) == {"dispersion", "and", "reachable"}
    assert "| 0.1 | 0.762 |" in product.words()
