"""Evaluate a mask on moments or on gradients `[E, *shape]`: the one place for faster ways to do either."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sandmask.masks._errors import MaskError
from sandmask.masks._functional import TensorMoments, finite, rescale_by_sparsity
from sandmask.masks._gpu import kernels, pack, packs, unpack
from sandmask.masks._layout import Gradients
from sandmask.masks._moments import GradientMoments

if TYPE_CHECKING:
    from sandmask.masks._base import Mask


class Evaluation(NamedTuple):
    """A mask and what it makes of the gradients, tensor by tensor, in the dtype that moments are kept in."""

    weights: list[Tensor]
    masked: list[Tensor]


def masked_mean_of(mask: "Mask", grads: Gradients, *, check_finite: bool) -> Any:
    """The masked mean of gradients `[E, *shape]`, in the form they came in."""
    if isinstance(grads, Tensor):
        one_pass = _in_one_pass(mask, grads, check_finite=check_finite)
        if one_pass is not None:
            return one_pass
    return masked_mean(mask, moments_for(mask, grads, check_finite=check_finite))


def _in_one_pass(mask: "Mask", grads: Tensor, *, check_finite: bool) -> Tensor | None:
    """The result of the GPU kernel; None where there is none, or where the slow way has an error to name."""
    triton = kernels([grads])
    if triton is None or not triton.supports(mask, grads):
        return None
    masked: Tensor = triton.masked_mean(mask, grads)
    return None if check_finite and not torch.isfinite(masked).all() else masked


def moments_for(mask: "Mask", grads: Gradients, *, check_finite: bool) -> GradientMoments:
    """The moments that this mask needs of gradients `[E, *shape]`."""
    return GradientMoments.of_gradients(grads, log_magnitude=mask.needs_log_magnitude, check_finite=check_finite)


@torch.no_grad()
def masked_mean(mask: "Mask", moments: GradientMoments) -> Any:
    """The masked mean gradient, in the form and dtype of the gradients."""
    weights, masked = evaluate(mask, moments)
    masked = [*mask.complete(weights, masked)]
    if mask.rescale == "sparsity":
        masked = [rescale_by_sparsity(m, w) for m, w in zip(masked, weights, strict=True)]
        masked = [finite(tensor, dtype) for tensor, dtype in zip(masked, moments.dtypes, strict=True)]
    return moments.restore([tensor.to(dtype) for tensor, dtype in zip(masked, moments.dtypes, strict=True)])


@torch.no_grad()
def mask_weights(mask: "Mask", moments: GradientMoments) -> Any:
    """The mask, in the form and dtype of the gradients."""
    weights = evaluate(mask, moments).weights
    return moments.restore([tensor.to(dtype) for tensor, dtype in zip(weights, moments.dtypes, strict=True)])


def evaluate(mask: "Mask", moments: GradientMoments) -> Evaluation:
    """Weights and masked gradients at every position of the moments' sums, not rescaled."""
    _check(mask, moments)
    weights: dict[int, Tensor] = {}
    masked: dict[int, Tensor] = {}
    for bucket in moments.buckets():
        sums = moments.sums.take(bucket)
        if packs(sums.mean):
            flat = pack(sums, moments.count)
            flat_weights = mask.element_weights(flat)
            found = unpack(flat_weights, sums.mean), unpack(flat_weights * mask.direction(flat), sums.mean)
        else:
            logs: list[Tensor | None] = [None] * len(bucket) if sums.log_sum is None else [*sums.log_sum]
            each = [
                TensorMoments(moments.count, *of_one)
                for of_one in zip(sums.sign_sum, sums.mean, sums.m2, logs, strict=True)
            ]
            each_weights = [mask.element_weights(one) for one in each]
            found = each_weights, [w * mask.direction(one) for w, one in zip(each_weights, each, strict=True)]
        weights.update(zip(bucket, found[0], strict=True))
        masked.update(zip(bucket, found[1], strict=True))
    return Evaluation([weights[i] for i in range(len(weights))], [masked[i] for i in range(len(masked))])


def check_count(count: int) -> None:
    """Raise unless there are environments to compare."""
    if count < 2:
        raise MaskError(f"The number of environments should be at least 2: a mask compares them. Found {count}.")


def _check(mask: "Mask", moments: GradientMoments) -> None:
    check_count(moments.count)
    if mask.needs_log_magnitude and not moments.log_magnitude:
        raise MaskError(
            f"{type(mask).__name__} needs moments with log-magnitudes. "
            "Build them with `mask.new_moments()`, or with `log_magnitude=True` where they are built for you."
        )
    moments.check_finite()
