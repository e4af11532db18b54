"""Every mask has the properties of its family."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sandmask import masks
from sandmask.masks import AgrRand, AgrSum, ANDMask, GeometricMean, Mask, SANDMask, TensorMoments, testing

MASKS: list[Mask] = [
    *(ANDMask(tau) for tau in (0.0, 1 / 3, 0.5, 1.0)),
    *(SANDMask(tau) for tau in (-1.0, -0.2, 0.0, 1 / 3, 0.8)),
    *(SANDMask(tau, dispersion="absolute", gain=gain) for tau in (0.0, 0.8) for gain in (1e-3, 10.0, 1e5)),
    *(GeometricMean(tau) for tau in (0.0, 0.7, 1.0)),
    AgrSum(),
]
RESCALED: list[Mask] = [
    ANDMask(0.6, rescale="sparsity"),
    SANDMask(0.2, rescale="sparsity"),
    SANDMask(0.2, rescale="sparsity", dispersion="absolute"),
    GeometricMean(0.6, rescale="sparsity"),
]
OF_MEAN = [mask for mask in MASKS if not isinstance(mask, GeometricMean | AgrSum)]
SCALE_FREE = [m for m in [*MASKS, *RESCALED] if isinstance(m, ANDMask) or getattr(m, "dispersion", "") == "relative"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

every_mask = pytest.mark.parametrize("mask", [*MASKS, *RESCALED], ids=repr)


@st.composite
def gradients(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Tensor:
    """Stacks of 2 to 6 environments, whose elements agree, disagree, vanish or are all the same."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    envs, size = draw(st.integers(2, 6)), draw(st.integers(1, 12))
    noise = torch.randn(envs, size, generator=generator, dtype=torch.float64)
    common = torch.randn(1, size, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.0, 1.0, 5.0]))
    keep = torch.rand(envs, size, generator=generator) < draw(st.sampled_from([0.5, 1.0]))
    same = torch.rand(1, size, generator=generator) < 0.2
    grads = torch.where(same, common.expand_as(noise), common + noise) * keep
    return (grads * draw(st.sampled_from([1e-4, 1.0, 1e3]))).to(dtype)


def test_every_public_mask_is_here() -> None:
    public = [value for value in map(vars(masks).get, masks.__all__) if isinstance(value, type)]
    random = {AgrRand}  # see test_agr_masks.py
    assert {kind for kind in public if issubclass(kind, Mask)} - {Mask} == {type(mask) for mask in MASKS} | random


@every_mask
@settings(max_examples=15, deadline=None)
@given(grads=gradients(), factor=st.sampled_from([0.5, 3.0, 1e-6, 1e6]))
def test_properties(mask: Mask, grads: Tensor, factor: float) -> None:
    if mask in MASKS:  # a rescaled result has no bound that an element's own gradients give
        testing.assert_permutation_invariant(mask, grads)
        testing.assert_streamed_equals_stacked(mask, grads)
        testing.assert_grouping_does_not_matter(mask, grads)
    testing.assert_odd(mask, grads)
    testing.assert_zero_in_zero_out(mask, grads)
    testing.assert_finite(mask, grads)
    if mask in OF_MEAN:
        testing.assert_between_zero_and_mean(mask, grads)
    if mask in SCALE_FREE and mask in MASKS:
        testing.assert_scale_equivariant(mask, grads, factor)


@every_mask
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_shape_are_preserved(mask: Mask, dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 4), (2, 3, 2, 2), (0,), (2, 0)):
        testing.assert_dtype_preserved(mask, torch.randn(3, *shape).to(dtype))


@pytest.mark.parametrize("mask", RESCALED, ids=repr)
def test_rescaled_masks_do_not_mind_the_order_of_environments(mask: Mask) -> None:
    grads = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    streamed = mask.new_moments()
    for grad in grads.flip(0):
        streamed.update(grad)
    torch.testing.assert_close(mask.from_moments(streamed), mask(grads))


@every_mask
def test_many_environments_take_the_same_way_in_chunks(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = torch.randn(7, 5, 11)
    whole = mask(grads)
    monkeypatch.setattr("sandmask.masks._two_pass._CHUNK_CPU", 7 * 4)
    torch.testing.assert_close(mask(grads), whole)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_forms_of_gradients_come_back_as_they_went_in(mask: Mask) -> None:
    a, b = torch.randn(3, 4), torch.randn(3, 2, 2)
    as_list, as_dict = mask([a, b]), mask({"a": a, "b": b})
    assert isinstance(as_list, list)
    assert list(as_dict) == ["a", "b"]
    for found in (as_list, list(as_dict.values()), list(mask.weights([a, b]))):
        assert [t.shape for t in found] == [(4,), (2, 2)]
    assert torch.equal(as_list[0], mask(a))
    assert torch.equal(as_dict["b"], mask(b))


def test_properties_can_fail() -> None:
    class First(ANDMask):
        """Depends on the order, and is not bounded by the mean."""

        def element_weights(self, moments: TensorMoments) -> Tensor:
            return moments.mean * 0 + 2

    with pytest.raises(AssertionError):
        testing.assert_between_zero_and_mean(First(1.0), torch.ones(2, 2))
    with pytest.raises(AssertionError):
        testing.assert_finite(First(1.0), torch.ones(2, 2))
    with pytest.raises(AssertionError):
        testing.assert_scale_equivariant(
            SANDMask(0.0, dispersion="absolute", gain=1.0), torch.tensor([[1.0], [2.0]]), 0.1
        )
