"""The tape.

One backward pass computes the gradients of all layers' inputs. Only the gradients of the weights have to be kept apart
by environment. This tape folds them into moments during the backward pass of each layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask._physical import RunsFunction, has_kernels
from sandmask.functional.conv import conv_block
from sandmask.functional.dense import Rows, affine, dense
from sandmask.functional.flat import Slot
from sandmask.functional.head import head, linear_pair
from sandmask.functional.scaling import scale
from sandmask.functional.split import split_products
from sandmask.functional.tape.layers import (
    taped_affine,
    taped_conv_block,
    taped_dense,
    taped_head,
    taped_linear,
    taped_linear_pair,
)
from sandmask.gradients import Tape, UnsupportedError
from sandmask.masks import TensorMoments, fold_runs, gradient_moments

Span = tuple[int, int]  # start and end of a parameter in the flat vector

# On a CPU, as many runs are processed together as have the gradients of a layer, for all environments, in the cache.
CACHED = 2**20


class MomentTape(Tape):
    """While active, inside `vmap`, layers that use watched parameters fold their gradients into moments [K, P].

    With `scales`, gradients are scaled (see `scaling`) at the last layer, which uses the last parameter. All gradients
    have to pass this layer.
    """

    layers: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {
        dense: taped_dense,
        affine: taped_affine,
        F.linear: taped_linear,
        head: taped_head,
        linear_pair: taped_linear_pair,
        conv_block: taped_conv_block,
    }

    def __init__(self, slots: Sequence[Slot], n_runs: int, n_envs: int, like: Tensor, *, scales: bool = False) -> None:
        super().__init__({})
        self.n_envs = n_envs
        self.rows = Rows(n_envs)
        self._scales_at = slots[-1].name if scales else None
        numel = sum(slot.numel for slot in slots)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self._buffers = torch.empty(3, n_runs, numel, dtype=dtype, device=like.device)  # sign sums, means, M2
        self.unscale: Tensor | None = None  # [K, E]: factors that undo the scaling of gradients
        self.takes_roots = True  # false if a layer cannot multiply by roots
        self._spans: dict[str, Span] = {}
        begin = 0
        for slot in slots:
            if slot.channels_last:
                raise UnsupportedError("a convolution in channels-last order")
            self._spans[slot.name] = (begin, begin + slot.numel)
            begin += slot.numel
        self._used: set[str] = set()
        self._filled: set[Span] = set()

    def computed(self, output: Tensor, used: set[str]) -> Tensor:
        """Scale the gradients of the network's output."""
        if self._scales_at not in used:
            return output
        result: Tensor = _Scaled.apply(output, self.scaled)  # type: ignore[no-untyped-call]
        return result

    def scaled(self, grad: Tensor) -> Tensor:
        """Scale the gradient of the logits [K, N, classes]."""
        result, self.unscale, self.rows.roots = scale(grad, self.n_envs, by_row=self.takes_roots and split_products())
        return result

    def claim(self, *params: Tensor | None) -> tuple[Span, ...]:
        """Return the spans of a layer's parameters. All of them have to be watched, and each may be claimed once."""
        names = [self.names.get(id(param), "") for param in params]
        if "" in names or len(set(names)) < len(names) or self._used & set(names):
            raise UnsupportedError("a parameter is used twice, or without the other parameters of its layer")
        self._used.update(names)
        return tuple(self._spans[name] for name in names)

    def check_rows(self, x: Tensor, ndim: int) -> None:
        """Check that a layer's input has one row per example, sorted by environment."""
        if x.ndim != ndim or x.shape[0] % self.n_envs:
            raise UnsupportedError(f"a layer's input has the shape {tuple(x.shape)}")

    def target(self, *spans: Span) -> Tensor:
        """Return a buffer to which a layer writes moments itself: sums of signs, means and M2 [3, K, P].

        For one span, the buffer contains only this span. The layer has to write all spans.
        """
        self._filled.update(spans)
        return self._buffers[..., slice(*spans[0])] if len(spans) == 1 else self._buffers

    def fold(self, span: Span, gradients: Callable[[slice], Tensor]) -> None:
        """Fold a parameter's gradients into moments. `gradients(runs)` returns those of some runs, [k, E, ...]."""
        targets = self.target(span)
        n_runs = together = targets.shape[1]
        if has_kernels(targets):
            from sandmask.functional.kernels import moments as moment_kernels

            found = gradients(slice(None)).flatten(2).unsqueeze(2)  # [K, E, 1, n]
            moment_kernels.fold_runs(found, self.unscale, targets, targets.shape[2])
            return
        on_cpu = targets.device.type == "cpu"
        if on_cpu:
            together = max(CACHED // (self.n_envs * targets.shape[2]), 1)
        for begin in range(0, n_runs, together):
            runs = slice(begin, begin + together)
            found = gradients(runs).flatten(2).to(targets.dtype)  # [k, E, n]
            if self.unscale is not None:
                found = found * self.unscale[runs].unsqueeze(-1)
            if on_cpu:
                fold_runs(found, targets[:, runs])
                continue
            moments = gradient_moments(found.transpose(0, 1))
            for target, value in zip(targets, (moments.sign_sum, moments.mean, moments.m2), strict=True):
                target[runs] = value

    def moments(self) -> TensorMoments:
        """Return the folded moments [K, P], with zeros for unused parameters."""
        for span in set(self._spans.values()) - self._filled:
            self._buffers[..., slice(*span)] = 0.0
        return TensorMoments(self.n_envs, *self._buffers)


class _Scaled(RunsFunction):
    """The identity, whose backward pass applies `change` to the gradient. Under `vmap`, it takes all K runs at once."""

    @staticmethod
    def forward(logits: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004 - for the backward pass
        return logits.view_as(logits)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        _, ctx.change = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None
