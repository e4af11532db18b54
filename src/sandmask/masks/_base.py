"""The base class of masks: it checks parameters, and evaluates masks on gradients and on moments."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from sandmask._physical import has_kernels
from sandmask.masks._errors import MaskError
from sandmask.masks._functional import Scalar, TensorMoments, finite, rescale_by_sparsity
from sandmask.masks._gpu import in_memory_order, masked_mean_by_kernel, pack, packs, unpack, weigh_by_kernel
from sandmask.masks._layout import Gradients
from sandmask.masks._moments import GradientMoments

Rescale = Literal["none", "sparsity"]


class Mask(ABC):
    """A weight in [0, 1] for every element of the mean gradient over environments.

    A mask is called on the gradients `[E, *shape]` of E environments: a tensor, or a sequence or dict of tensors. It
    returns the masked mean gradient `[*shape]`, in the gradients' dtype. `from_moments` does the same with
    `GradientMoments`.

    A subclass defines `element_weights`, and also `direction` if it masks something other than the mean.

    :param tau: threshold on the agreement of signs; a number, or a 0-dimensional tensor, whose value is not
        checked.
    :param rescale: "none", as in the paper, or "sparsity": divide each tensor's result by the mean of its mask plus
        1e-10, as in the code of ILC and DomainBed.
    """

    tau_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    needs_log_magnitude: ClassVar[bool] = False

    def __init__(self, tau: Scalar, rescale: Rescale = "none") -> None:
        low, high = self.tau_range
        check_number("tau", tau)
        if not isinstance(tau, Tensor) and not low <= tau <= high:
            raise MaskError(f"Parameter `tau` should be in [{low:g}, {high:g}]. Found `tau` = {tau}.")
        if rescale not in ("none", "sparsity"):
            raise MaskError(f'Parameter `rescale` should be "none" or "sparsity". Found `rescale` = {rescale!r}.')
        self.tau = tau
        self.rescale = rescale

    @abstractmethod
    def element_weights(self, moments: TensorMoments) -> Tensor:
        """Return the mask of one tensor from the moments of at least two environments."""

    def direction(self, moments: TensorMoments) -> Tensor:
        """Return the gradient by which the mask is multiplied; by default the mean."""
        return moments.mean

    def complete(self, weights: Sequence[Tensor], masked: Sequence[Tensor]) -> Sequence[Tensor]:  # noqa: ARG002
        """Return the masked gradients of all tensors, changed with regard to all masks. By default, nothing changes."""
        return masked

    def weigh(self, moments: TensorMoments) -> tuple[Tensor, Tensor]:
        """Return the mask and the masked gradient of one tensor, not rescaled. Works under `torch.func.vmap`."""
        if has_kernels(moments.mean) and (found := weigh_by_kernel(self, moments)) is not None:
            return found
        weights = self.element_weights(moments)
        return weights, weights * self.direction(moments)

    @overload
    def __call__(self, grads: Tensor, *, check_finite: bool = ...) -> Tensor: ...
    @overload
    def __call__(self, grads: Sequence[Tensor], *, check_finite: bool = ...) -> list[Tensor]: ...
    @overload
    def __call__(self, grads: Mapping[str, Tensor], *, check_finite: bool = ...) -> dict[str, Tensor]: ...
    def __call__(self, grads: Gradients, *, check_finite: bool = True) -> Any:
        """Return the masked mean of gradients `[E, *shape]`.

        `check_finite=False` omits the check for inf and NaN, which waits for the device once per call.
        """
        found = masked_mean_by_kernel(self, grads) if isinstance(grads, Tensor) else None
        if found is None or (check_finite and not torch.isfinite(found).all()):  # the slow path names the gradient
            return self.from_moments(self._moments_of(grads, check_finite))
        return found

    @overload
    def weights(self, grads: Tensor, *, check_finite: bool = ...) -> Tensor: ...
    @overload
    def weights(self, grads: Sequence[Tensor], *, check_finite: bool = ...) -> list[Tensor]: ...
    @overload
    def weights(self, grads: Mapping[str, Tensor], *, check_finite: bool = ...) -> dict[str, Tensor]: ...
    def weights(self, grads: Gradients, *, check_finite: bool = True) -> Any:
        """Return the mask itself for gradients `[E, *shape]`."""
        return self.weights_from_moments(self._moments_of(grads, check_finite))

    @torch.no_grad()
    def from_moments(self, moments: GradientMoments) -> Any:
        """Return the masked mean gradient in the form of the gradients, with `None` for tensors without a gradient."""
        weights, masked = evaluate(self, moments)
        masked = [*self.complete(weights, masked)]
        if self.rescale == "sparsity":
            masked = [rescale_by_sparsity(m, w) for m, w in zip(masked, weights, strict=True)]
            masked = [finite(tensor, dtype) for tensor, dtype in zip(masked, moments.dtypes, strict=True)]
        return moments.restore([tensor.to(dtype) for tensor, dtype in zip(masked, moments.dtypes, strict=True)])

    @torch.no_grad()
    def weights_from_moments(self, moments: GradientMoments) -> Any:
        """Return the mask itself in the form of the gradients."""
        weights, _ = evaluate(self, moments)
        return moments.restore([tensor.to(dtype) for tensor, dtype in zip(weights, moments.dtypes, strict=True)])

    def new_moments(self, *, check_finite: bool = True) -> GradientMoments:
        """Return empty moments, with log-magnitudes if this mask needs them."""
        return GradientMoments(log_magnitude=self.needs_log_magnitude, check_finite=check_finite)

    def _moments_of(self, grads: Gradients, check_finite: bool) -> GradientMoments:
        return GradientMoments.of_gradients(grads, log_magnitude=self.needs_log_magnitude, check_finite=check_finite)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def evaluate(mask: Mask, moments: GradientMoments) -> tuple[list[Tensor], list[Tensor]]:
    """Return the masks and masked gradients of all tensors in the moments' sums, in their dtype and not rescaled."""
    check_count(moments.count)
    if mask.needs_log_magnitude and not moments.log_magnitude:
        raise MaskError(
            f"{type(mask).__name__} needs moments with log-magnitudes. "
            "Create them with `mask.new_moments()`, or pass `log_magnitude=True` to the function that creates them."
        )
    moments.check_finite()
    weights: dict[int, Tensor] = {}
    masked: dict[int, Tensor] = {}
    for bucket in moments.buckets():
        if packs(moments.sums.take(bucket).mean):
            positions = in_memory_order(bucket, moments.sums.mean)
            sums = moments.sums.take(positions)
            flat = pack(sums, moments.count)
            flat_weights = mask.element_weights(flat)
            weights.update(zip(positions, unpack(flat_weights, sums.mean), strict=True))
            masked.update(zip(positions, unpack(flat_weights * mask.direction(flat), sums.mean), strict=True))
        else:
            for position in bucket:
                one = moments.sums.at(position, moments.count)
                weights[position] = mask.element_weights(one)
                masked[position] = weights[position] * mask.direction(one)
    return [weights[i] for i in range(len(weights))], [masked[i] for i in range(len(masked))]


def check_count(count: int) -> None:
    """Raise an error for fewer than two environments."""
    if count < 2:
        raise MaskError(f"The number of environments should be at least 2: a mask compares them. Found {count}.")


def check_number(name: str, value: object) -> None:
    """Raise an error unless the parameter is a number or a 0-dimensional tensor."""
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise MaskError(f"Parameter `{name}` should be a number. Found `{name}` of shape {tuple(value.shape)}.")
    elif not isinstance(value, Real):
        raise MaskError(f"Parameter `{name}` should be a number. Found `{name}` = {value!r}.")
