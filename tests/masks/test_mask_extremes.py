"""No finite gradient, however extreme, gives inf or NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sandmask.masks import ANDMask, GeometricMean, GradientMoments, Mask, SANDMask, rescale_by_sparsity, testing

MASKS: list[Mask] = [
    build
    for rescale in ("none", "sparsity")
    for build in (
        ANDMask(0.0, rescale=rescale),
        ANDMask(1.0, rescale=rescale),
        SANDMask(0.5, rescale=rescale),
        SANDMask(-1.0, rescale=rescale),
        SANDMask(0.0, rescale=rescale, dispersion="absolute", gain=1e-3),
        SANDMask(0.0, rescale=rescale, dispersion="absolute", gain=1e5),
        GeometricMean(0.0, rescale=rescale),
        GeometricMean(1.0, rescale=rescale),
    )
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@st.composite
def extreme_gradients(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Largest, smallest and denormal numbers of the dtype, zeros, of both signs, and anything between."""
    info = torch.finfo(dtype)
    special = [0.0, 1.0, 1.5, info.max, info.max * 0.9, info.tiny, info.smallest_normal / 8, 1e-4, info.eps]
    values = st.one_of(st.sampled_from(special), st.floats(0, 1e30).map(lambda x: min(x, info.max)))
    signed = st.tuples(values, st.sampled_from([1.0, -1.0])).map(lambda pair: pair[0] * pair[1])
    envs, size = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    rows = draw(st.lists(st.lists(signed, min_size=size, max_size=size), min_size=envs, max_size=envs))
    return torch.tensor(rows, dtype=torch.float64).clamp(info.min, info.max).to(dtype)


def moments_of(grads: Tensor, log_magnitude: bool) -> tuple[GradientMoments, GradientMoments]:
    """Moments that were updated with one environment after the other, and moments that were merged."""
    streamed, left, right = (GradientMoments(log_magnitude=log_magnitude) for _ in range(3))
    for e, grad in enumerate(grads):
        streamed.update(grad)
        (left if e == 0 else right).update(grad)
    return streamed, left.merge(right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_finite_in_finite_out(dtype: torch.dtype, data: st.DataObject) -> None:
    grads = data.draw(extreme_gradients(dtype))
    assert bool(grads.isfinite().all())
    collected = {log_magnitude: moments_of(grads, log_magnitude) for log_magnitude in (False, True)}
    for mask in MASKS:
        testing.assert_finite(mask, grads)
        for moments in collected[mask.needs_log_magnitude]:
            assert bool(mask.from_moments(moments).isfinite().all()), (mask, grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("envs", [2, 3, 5, 16])
def test_the_largest_numbers_of_both_signs_have_the_right_mean(dtype: torch.dtype, envs: int) -> None:
    largest = torch.finfo(dtype).max
    grads = torch.full((envs, 2), largest, dtype=dtype)
    grads[0, 1] = -largest
    expected = torch.tensor([1.0, (envs - 2) / envs], dtype=torch.float64) * largest
    streamed = ANDMask(0.0).new_moments()
    for grad in grads:
        streamed.update(grad)
    backwards = ANDMask(0.0).new_moments()
    for grad in grads.flip(0):
        backwards.merge(ANDMask(0.0).new_moments().update(grad))
    many_into_one = ANDMask(0.0).new_moments().update(grads[0]).merge(GradientMoments.of_gradients(grads[1:]))
    one_into_many = GradientMoments.of_gradients(grads[1:]).update(grads[0])
    results = [ANDMask(0.0)(grads)]
    results += [ANDMask(0.0).from_moments(m) for m in (streamed, backwards, many_into_one, one_into_many)]
    for found in results:
        torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps * 4, atol=largest * 1e-6)


def test_one_environment_of_many_that_disagrees() -> None:
    grads = torch.full((9, 1), 1e30)
    grads[4] = -3e38
    for mask in MASKS:
        testing.assert_finite(mask, grads)
    assert ANDMask(1.0)(grads).item() == 0


def test_a_large_gradient_divided_by_a_small_density() -> None:
    largest = torch.finfo(torch.float32).max
    found = rescale_by_sparsity(torch.tensor([largest, 0.0]), torch.tensor([1.0, 0.0]))
    assert found.tolist() == [largest, 0.0]


def test_denormal_gradients_that_agree_are_kept_by_the_and_mask() -> None:
    grads = torch.full((3, 1), 1e-42)
    assert ANDMask(1.0)(grads).item() == pytest.approx(1e-42, rel=1e-2)
    assert SANDMask(0.5).weights(grads).item() == 1
