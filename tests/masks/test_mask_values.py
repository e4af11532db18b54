"""Masks against a slow, obvious twin in NumPy's float64, and cases a careful reader asks about."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from sandmask.masks import (
    ANDMask,
    GeometricMean,
    Mask,
    MaskWarning,
    SANDMask,
    _errors,
    gradient_moments,
    sand_weights,
)

Element = NDArray[np.float64]


def weight_of(mask: Mask, g: Element) -> float:
    """The printed equations for one element, with its gradients in E environments."""
    agreement = abs(np.sign(g).sum()) / len(g)
    tau = float(mask.tau)
    equal = math.isclose(agreement, tau, abs_tol=1e-9)
    if not isinstance(mask, SANDMask):
        return float(agreement > tau or equal)
    mean, variance = g.sum() / len(g), ((g - g.mean()) ** 2).sum() / (len(g) - 1)
    if agreement <= tau or equal or (mask.dispersion == "relative" and mean == 0):
        return 0.0
    if variance == 0:
        return 1.0
    if mask.dispersion == "relative":
        return math.tanh((agreement - tau) / (variance / mean**2))
    return math.tanh(float(mask.gain or 0) * (agreement - tau) / variance)


def twin(mask: Mask, grads: Tensor) -> tuple[Element, Element]:
    """Weights and result, element by element."""
    g = grads.double().numpy().reshape(len(grads), -1)
    weights = np.array([weight_of(mask, g[:, j]) for j in range(g.shape[1])])
    direction = g.mean(0)
    if isinstance(mask, GeometricMean):
        direction = np.sign(direction) * np.exp(np.log(np.abs(g) + 1e-10).mean(0))
    masked = weights * direction
    if mask.rescale == "sparsity":
        masked = masked / (weights.mean() + 1e-10)
    return weights, masked


taus = st.sampled_from([0.0, 0.2, 1 / 3, 0.5, 2 / 3, 0.75, 0.9])
rescales = st.sampled_from(["none", "sparsity"])
masks = st.one_of(
    st.builds(ANDMask, tau=st.one_of(taus, st.just(1.0)), rescale=rescales),
    st.builds(GeometricMean, tau=st.one_of(taus, st.just(1.0)), rescale=rescales),
    st.builds(SANDMask, tau=st.one_of(taus, st.sampled_from([-1.0, -0.5])), rescale=rescales),
    st.builds(
        SANDMask,
        tau=taus,
        rescale=rescales,
        dispersion=st.just("absolute"),
        gain=st.sampled_from([1e-3, 1.0, 10.0, 1e5]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(mask=masks, seed=st.integers(0, 2**32), envs=st.integers(2, 9), streamed=st.booleans(), wide=st.booleans())
def test_every_mask_equals_its_twin(mask: Mask, seed: int, envs: int, streamed: bool, wide: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(envs, 20, generator=generator) + torch.randn(20, generator=generator)
    grads[:, :3] = 0.0
    grads[:, 3:5] = 0.25
    grads[0, 5:8] = 0.0
    grads = grads.double() if wide else grads
    weights, masked = twin(mask, grads)
    moments = mask.new_moments()
    if streamed:
        for grad in grads:
            moments.update(grad)
    else:
        moments.update_many(grads)
    rtol, atol = (1e-9, 1e-9) if wide else (2e-4, 2e-5)
    np.testing.assert_allclose(mask.weights_from_moments(moments), weights, rtol=rtol, atol=atol)
    np.testing.assert_allclose(mask.from_moments(moments), masked, rtol=rtol, atol=atol)


def test_and_mask_with_tau_0_is_the_mean() -> None:
    grads = torch.randn(4, 30)
    torch.testing.assert_close(ANDMask(0)(grads), grads.mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("envs", [3, 5, 6, 7, 10, 49, 100])
def test_thresholds_that_equal_an_agreement_behave_as_in_the_reals(envs: int, dtype: torch.dtype) -> None:
    for agreeing in range(envs // 2 + 1, envs + 1):
        surplus = 2 * agreeing - envs
        grads = torch.cat([torch.ones(agreeing, 1), -torch.ones(envs - agreeing, 1)]).to(dtype)
        for tau in (surplus / envs, torch.tensor(surplus / envs, dtype=torch.float32)):
            assert ANDMask(tau).weights(grads).item() == 1  # A >= tau
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MaskWarning)
                assert SANDMask(tau).weights(grads).item() == 0  # A > tau does not hold
        assert ANDMask(min(surplus / envs + 1e-5, 1)).weights(grads).item() == float(surplus == envs)
        assert SANDMask(surplus / envs - 1e-5).weights(grads).item() > 0


def test_sand_without_dispersion_is_a_threshold() -> None:
    same = torch.full((3, 1), 0.3)
    for mask in (SANDMask(0.9), SANDMask(0.9, dispersion="absolute", gain=1e-3)):
        assert mask.weights(same).item() == 1
        assert mask(same).item() == same[0].item()


@pytest.mark.parametrize("value", [1e10, 1e-10, 0.1, 3.0])
@pytest.mark.parametrize("envs", [2, 3, 7, 100])
def test_identical_gradients_have_exactly_no_variance(value: float, envs: int) -> None:
    mask = SANDMask(0.5, dispersion="absolute")
    grads = torch.full((envs, 2), value)
    streamed = mask.new_moments()
    for grad in grads:
        streamed.update(grad)
    merged = mask.new_moments().merge(streamed).merge(streamed)
    for moments in (streamed, merged, mask.new_moments().update_many(grads)):
        assert moments.m2.tolist() == [0, 0]
        assert mask.from_moments(moments).tolist() == grads[0].tolist()


@pytest.mark.parametrize("tau", [0.8, 0.0, -0.5, torch.tensor(0.3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_in_place_are_those_of_the_function(tau: float | Tensor, dtype: torch.dtype) -> None:
    grads = torch.cat([torch.randn(6, 500), torch.zeros(6, 2), torch.full((6, 2), 3.0)], dim=1).to(dtype)
    grads[:, 0] = torch.tensor([1e19, -1e19, 1e19, 1e19, 1e19, 1e19])
    moments = gradient_moments(grads)
    before = gradient_moments(grads)
    with torch.no_grad():
        found = SANDMask(tau).element_weights(moments)
    assert torch.equal(found, sand_weights(before.sign_sum, before.mean, before.m2, before.count, tau))
    assert torch.equal(found, SANDMask(tau).element_weights(moments))  # which autograd may follow: not in place
    for name in ("sign_sum", "mean", "m2"):
        assert torch.equal(getattr(moments, name), getattr(before, name))


def test_zero_mean_gives_zero() -> None:
    assert SANDMask(-1.0).weights(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).tolist() == [0, 0]


def test_with_two_environments_sand_is_zero_wherever_and_is() -> None:
    grads = torch.randn(2, 500)
    grads[:, :50] = 0
    grads[0, 50:100] = 0
    for tau in (0.0, 0.3, 0.5, 0.8):
        dead = ANDMask(max(tau, 1e-3)).weights(grads) == 0
        assert bool((SANDMask(tau).weights(grads)[dead] == 0).all())
    assert bool((SANDMask(-0.5).weights(grads)[ANDMask(0.5).weights(grads) == 0] > 0).any())


def test_with_three_environments_all_taus_between_one_third_and_one_are_one_and_mask() -> None:
    grads = torch.randn(3, 200)
    expected = ANDMask(1.0).weights(grads)
    for tau in (0.34, 0.5, 0.7, 0.99):
        assert torch.equal(ANDMask(tau).weights(grads), expected)


def test_released_form_is_a_hard_threshold_at_small_scale() -> None:
    grads = torch.randn(5, 300) * 1e-4
    weights = SANDMask(0.5, dispersion="absolute").weights(grads)
    assert torch.equal(weights, (grads.sign().mean(0).abs() > 0.5).float())


def test_sand_with_tau_1_warns_once_and_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_errors, "_warned", set())
    with pytest.warns(MaskWarning, match="nothing will train"):
        mask = SANDMask(tau=1.0)
    SANDMask(tau=1)  # warnings are errors here: a second one would fail
    assert not mask(torch.ones(3, 4)).any()


def test_rescaling_divides_tensor_by_tensor() -> None:
    half, full = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(2, 2)
    rescaled = ANDMask(1.0, rescale="sparsity")([half, full])
    assert rescaled[0].tolist() == pytest.approx([2, 0])
    assert rescaled[1].tolist() == pytest.approx([1, 1])


def test_the_geometric_mean_of_gradients_that_cancel_out_is_zero_in_any_order() -> None:
    values = torch.tensor([0.1, 0.2, 0.3, -0.6, 0.7, -0.7])
    mask = GeometricMean(tau=0.0)
    for order in itertools.permutations(range(6)):
        gradients = values[list(order)][:, None]
        moments = mask.new_moments()
        for gradient in gradients:
            moments.update(gradient)
        assert mask(gradients).item() == mask.from_moments(moments).item() == 0.0
    assert mask(torch.tensor([1.0, 1.0, -1.9])[:, None]).item() > 0


def test_the_geometric_mean_of_huge_gradients_keeps_its_sign() -> None:
    assert GeometricMean(tau=0.0)(torch.tensor([3e30, 2e30, -1e30])[:, None]).item() > 0
