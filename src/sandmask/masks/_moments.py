"""Running moments over environments, from which all masks are computed. Memory does not grow with E."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sandmask.masks._errors import MaskError
from sandmask.masks._finite import FiniteCheck, check_gradients_finite
from sandmask.masks._functional import EPSILON, TensorMoments, agreement
from sandmask.masks._gpu import moments_of_many
from sandmask.masks._layout import Gradients, Layout, check_kind
from sandmask.masks._two_pass import accumulation_dtype, gradient_moments
from sandmask.masks._welford import Sums, buckets, fold_gradients, fold_sums

_BUCKET = 2**22  # elements per kernel launch; temporaries stay small compared to the model


class GradientMoments:
    """Count, sum of signs, mean and sum of squared deviations (M2) over environments, for every element.

    Gradients are one tensor, a sequence of tensors, or a dict of tensors by name. Results have the same form, in
    float32 (float64 for float64 gradients). Add environments one by one (`update`), several at a time (`update_many`)
    or from another object (`merge`). Order and grouping change the result only by rounding. For any number of
    environments, memory holds three buffers of the model's size (four with `log_magnitude`).

    In float32, the squares of deviations below about 1e-22 underflow, and the squares of deviations above 1e19
    overflow. Such elements count as having no dispersion, or too much of it. Nothing becomes NaN.

    :param log_magnitude: also sum log(|g| + 1e-10), which `GeometricMean` needs.
    :param check_finite: remember on the device which gradients are not finite, and raise an error when a mask first
        reads the moments. This costs one synchronization instead of one per environment.
    """

    def __init__(self, *, log_magnitude: bool = False, check_finite: bool = True) -> None:
        self.count = 0
        self.layout: Layout | None = None
        self.sums = Sums(log_sum=[] if log_magnitude else None)
        self.dtypes: list[torch.dtype] = []
        # Index of a tensor -> position of its moments in `sums`, sorted by position. A tensor without a gradient so far
        # has no entry.
        self.position: dict[int, int] = {}
        self._buckets: list[list[int]] = []
        self.finite = FiniteCheck() if check_finite else None
        self.merged = False  # whether environments of other processes are included

    @classmethod
    def of_gradients(
        cls,
        grads: Gradients,
        *,
        log_magnitude: bool = False,
        check_finite: bool = True,
        environments: Sequence[int] | None = None,
    ) -> "GradientMoments":
        """Return the moments of the gradients `[E, *shape]` of E environments, computed in two passes.

        Works under `torch.func.vmap` with `check_finite=False`, because the check reads a value.

        :param environments: the numbers of the environments in errors; 0 to E - 1 if not given.
        """
        layout = Layout.of(grads)
        gradients = {i: gradient for i, gradient in enumerate(layout.flatten(grads)) if gradient is not None}
        self = cls(log_magnitude=log_magnitude, check_finite=check_finite)
        self.layout = layout
        self.count = _number_of_environments(layout, gradients)
        with torch.no_grad():
            together = None if log_magnitude else moments_of_many(list(gradients.values()))
            each = together or (gradient_moments(gradient, log=log_magnitude) for gradient in gradients.values())
            for (i, gradient), moments in zip(gradients.items(), each, strict=True):
                self._append(i, moments, gradient.dtype)
            if check_finite:
                check_gradients_finite(layout, gradients, self.sums.mean, environments or range(self.count))
        return self

    @classmethod
    def of_named(
        cls, named: Mapping[str, TensorMoments], like: Mapping[str, Tensor], *, check_finite: bool = True
    ) -> "GradientMoments":
        """Return an object with these moments of some of the tensors in `like`. The other tensors have no gradient.

        With `check_finite`, the moments should be of finite gradients.
        """
        self = cls(check_finite=check_finite)
        self.layout = Layout.of(like)
        self.count = next(iter(named.values())).count
        for i, (name, tensor) in enumerate(like.items()):
            if name in named:
                self._append(i, named[name], tensor.dtype)
        return self

    @property
    def log_magnitude(self) -> bool:
        """Whether log-magnitudes are also summed."""
        return self.sums.log_sum is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors: the keys of the dict, or numbers."""
        return () if self.layout is None else self.layout.names

    @torch.no_grad()
    def update(self, grads: Gradients) -> "GradientMoments":
        """Add the gradients of one environment. `None` is a gradient of zeros."""
        layout = self.layout or Layout.of(grads)
        present = {i: grad for i, grad in enumerate(layout.flatten(grads)) if grad is not None}
        for i, grad in present.items():
            self._check(layout, i, grad)
        self.layout = layout
        for i, grad in present.items():
            if i not in self.position:
                self.open_slot(i, grad, grad.dtype)
        indices = list(self.position)
        for bucket in self.buckets():
            sums, here = self.sums.take(bucket), [indices[position] for position in bucket]
            folded = [
                present[i].to(mean.dtype) if i in present else torch.zeros_like(mean)
                for i, mean in zip(here, sums.mean, strict=True)
            ]
            if self.finite is not None:
                self.finite.record(self.count, here, folded)
            fold_gradients(sums, folded, self.count + 1)
        self.count += 1
        return self

    def update_many(self, grads: Gradients, *, environments: Sequence[int] | None = None) -> "GradientMoments":
        """Add the gradients `[E, *shape]` of E environments.

        :param grads: the gradients.
        :param environments: the numbers of the environments in errors; the next E numbers if not given.
        """
        more = GradientMoments.of_gradients(
            grads,
            log_magnitude=self.log_magnitude,
            check_finite=self.finite is not None,
            environments=environments or range(self.count, sys.maxsize),
        )
        return self.merge(more)

    @torch.no_grad()
    def merge(self, other: "GradientMoments") -> "GradientMoments":
        """Add the environments of another object (Chan et al.). `other` does not change."""
        if self.log_magnitude != other.log_magnitude:
            raise MaskError("Moments with and without log-magnitudes cannot be merged. Create both in the same way.")
        if other.layout is None:
            return self
        if self.layout is not None and self.layout != other.layout:
            raise MaskError(f"Moments to merge should be of the same tensors. Found {self.layout} and {other.layout}.")
        self.layout = other.layout
        for i, position in other.position.items():
            mean = other.sums.mean[position]
            self._check(self.layout, i, mean)
            if i not in self.position:
                self.open_slot(i, mean, other.dtypes[position])
        theirs = other.widened(self)
        if self.finite is not None and other.finite is not None:
            self.finite.extend(other.finite, offset=self.count)
        if self.count == 0:
            self.sums = theirs.clone()
        elif other.count > 0:
            for bucket in self.buckets():
                fold_sums(self.sums.take(bucket), self.count, theirs.take(bucket), other.count)
        self.count += other.count
        return self

    def check_finite(self) -> None:
        """Raise a `MaskError` that names the parameter and the environment if a gradient was not finite."""
        if self.finite is not None and self.layout is not None:
            self.finite.raise_if_not_finite(self.layout)

    def of(self, index: int) -> TensorMoments | None:
        """Return the moments of one tensor; `None` if it had no gradient in any environment."""
        position = self.position.get(index)
        return None if position is None else self.sums.at(position, self.count)

    def buckets(self) -> list[list[int]]:
        """The groups of positions in `sums` that are processed together."""
        if sum(map(len, self._buckets)) != len(self.sums.mean):
            means = enumerate(self.sums.mean)
            self._buckets = buckets({i: (f"{mean.device} {mean.dtype}", mean.numel()) for i, mean in means}, _BUCKET)
        return self._buckets

    def restore(self, values: list[Any]) -> Any:
        """Return values, one per position in `sums`, in the form of the gradients."""
        if self.layout is None:
            raise MaskError("Moments should have at least one environment before they are read. Call `update` first.")
        found = dict(zip(self.position, values, strict=True))
        return self.layout.restore([found.get(i) for i in range(len(self.layout.names))])

    @property
    def sign_sum(self) -> Any:
        """Sum over environments of sign(g), in the form of the gradients."""
        return self.restore(self.sums.sign_sum)

    @property
    def mean(self) -> Any:
        """Mean over environments."""
        return self.restore(self.sums.mean)

    @property
    def m2(self) -> Any:
        """Sum over environments of squared deviations from the mean."""
        return self.restore(self.sums.m2)

    @property
    def log_sum(self) -> Any:
        """Sum over environments of log(|g| + 1e-10), or `None` without `log_magnitude`."""
        return None if self.sums.log_sum is None else self.restore(self.sums.log_sum)

    @property
    def variance(self) -> Any:
        """Unbiased variance over environments (divided by E - 1)."""
        return self.restore([m2 / (self.count - 1) for m2 in self.sums.m2])

    @property
    def agreement(self) -> Any:
        """A = |mean_e sign(g_e)|."""
        return self.restore([agreement(sign_sum, self.count) for sign_sum in self.sums.sign_sum])

    def __repr__(self) -> str:
        return f"GradientMoments({self.count} environments of {self.layout or 'nothing yet'})"

    def _append(self, index: int, moments: TensorMoments, dtype: torch.dtype) -> None:
        self.position[index] = len(self.sums.mean)
        self.dtypes.append(dtype)
        self.sums.append(moments)

    def open_slot(self, index: int, like: Tensor, dtype: torch.dtype) -> None:
        """Add the moments of a tensor whose gradient was zero in every environment so far."""
        kept = accumulation_dtype(like.dtype)
        sign_sum, mean, m2 = (torch.zeros_like(like, dtype=kept) for _ in range(3))
        logs = torch.full_like(mean, self.count * math.log(EPSILON)) if self.log_magnitude else None
        self._append(index, TensorMoments(self.count, sign_sum, mean, m2, logs), dtype)

    def widened(self, to: "GradientMoments") -> Sums:
        """Return the sums in the order of `to`, with moments of zeros for tensors that had no gradient here."""
        wide = GradientMoments(log_magnitude=self.log_magnitude)
        wide.count = self.count
        for i, position in to.position.items():
            if (mine := self.of(i)) is None:
                wide.open_slot(i, to.sums.mean[position], to.dtypes[position])
            else:
                wide._append(i, mine, to.dtypes[position])
        return wide.sums

    def _check(self, layout: Layout, index: int, grad: Tensor) -> None:
        check_kind(layout, index, grad)
        if (position := self.position.get(index)) is None:
            return
        mean = self.sums.mean[position]
        if grad.shape != mean.shape or grad.device != mean.device:
            raise MaskError(
                f"{layout.describe(index)} in environment {self.count} should have shape "
                f"{tuple(mean.shape)} on {mean.device}, as in earlier environments. "
                f"Found {tuple(grad.shape)} on {grad.device}."
            )


def _number_of_environments(layout: Layout, gradients: dict[int, Tensor]) -> int:
    count: int | None = None
    for i, gradient in gradients.items():
        check_kind(layout, i, gradient)
        if gradient.ndim == 0 or gradient.shape[0] == 0:
            raise MaskError(
                f"{layout.describe(i)} should be stacked over environments, [E, *shape] with E >= 1. "
                f"Found shape {tuple(gradient.shape)}."
            )
        count = gradient.shape[0] if count is None else count
        if gradient.shape[0] != count:
            raise MaskError(
                f"{layout.describe(i)} should have {count} environments in its first dimension, like the "
                f"other tensors. Found shape {tuple(gradient.shape)}."
            )
    if count is None:
        raise MaskError("Parameter `grads` should hold at least one tensor. Found none.")
    return count
