"""Assertions of the properties that every mask should have. Use them to test your own mask.

Each function takes a mask and gradients `[E, *shape]`. The tolerance is a few rounding errors of the dtype of the
moments, relative to the largest gradient of the element.
"""

from itertools import pairwise

import torch
from torch import Tensor

from sandmask.masks._base import Mask
from sandmask.masks._two_pass import accumulation_dtype


def assert_close(found: Tensor, expected: Tensor, grads: Tensor, roundings: float = 64.0) -> None:
    """Assert that two results for these gradients are equal up to rounding."""
    kept = accumulation_dtype(grads.dtype)
    unit = max(torch.finfo(kept).eps * roundings, torch.finfo(grads.dtype).eps)
    scale = grads.to(kept).abs().amax(0).clamp(min=torch.finfo(kept).tiny)
    error = (found.to(kept) - expected.to(kept)).abs() / scale
    assert bool((error <= unit).all()), f"relative error {error.max().item():.3g} exceeds {unit:.3g}"


def assert_permutation_invariant(mask: Mask, grads: Tensor) -> None:
    """The order of environments does not matter."""
    for order in (torch.arange(len(grads)).flip(0), torch.randperm(len(grads))):
        assert_close(mask(grads[order]), mask(grads), grads)


def assert_odd(mask: Mask, grads: Tensor) -> None:
    """Gradients of the opposite sign give the opposite result, exactly."""
    assert torch.equal(mask(-grads), -mask(grads))


def assert_scale_equivariant(mask: Mask, grads: Tensor, factor: float) -> None:
    """Gradients times a positive factor give the result times that factor."""
    assert_close(mask(grads * factor), mask(grads) * factor, grads * factor)


def assert_zero_in_zero_out(mask: Mask, grads: Tensor) -> None:
    """Gradients of zeros give zeros."""
    assert torch.equal(mask(torch.zeros_like(grads)), torch.zeros_like(grads[0]))


def assert_finite(mask: Mask, grads: Tensor) -> None:
    """Results and weights are finite, and weights are between 0 and 1."""
    weights = mask.weights(grads)
    assert bool(mask(grads).isfinite().all()), mask(grads)
    assert bool(((weights >= 0) & (weights <= 1)).all()), weights


def assert_between_zero_and_mean(mask: Mask, grads: Tensor) -> None:
    """The result is zero, or has the sign of the mean and is not larger. This does not apply to rescaled masks."""
    masked = mask(grads)
    mean = mask.new_moments().update_many(grads).mean.to(grads.dtype)
    assert bool((masked * mean.sign() >= 0).all())
    assert bool((masked.abs() <= mean.abs()).all())


def assert_dtype_preserved(mask: Mask, grads: Tensor) -> None:
    """Results and weights have the dtype and shape of the gradients."""
    for result in (mask(grads), mask.weights(grads)):
        assert result.dtype == grads.dtype
        assert result.shape == grads.shape[1:]


def assert_streamed_equals_stacked(mask: Mask, grads: Tensor) -> None:
    """Adding environments one by one gives the same result as all environments at once."""
    moments = mask.new_moments()
    for grad in grads:
        moments.update(grad)
    assert_close(mask.from_moments(moments), mask(grads), grads)


def assert_grouping_does_not_matter(mask: Mask, grads: Tensor) -> None:
    """Moments of any groups of environments, merged in any order, give the same result as all at once."""
    for cut in range(1, len(grads)):
        bounds = sorted({0, cut, (cut + len(grads)) // 2, len(grads)})
        parts = [mask.new_moments().update_many(grads[low:high]) for low, high in pairwise(bounds)]
        for order in (parts, parts[::-1]):
            merged = mask.new_moments()
            for part in order:
                merged.merge(part)
            assert merged.count == len(grads)
            assert_close(mask.from_moments(merged), mask(grads), grads)
