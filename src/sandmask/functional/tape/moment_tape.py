"""The tape.

One backward pass gives the gradients of all layers' inputs; only the gradients of the weights have to be kept apart by
environment. Here they are folded into moments in the layer's backward pass.
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

Place = tuple[int, int]  # where in the flat vector a parameter begins and ends

# On a CPU, runs are taken together as long as all their environments' gradients of a layer stay in the cache.
CACHED = 2**20


class MomentTape(Tape):
    """While active, inside `vmap`, layers that use watched parameters fold their gradients into moments [K, P].

    With `scales`, gradients are scaled (see `scaling`) at the last layer, the one that uses the last parameter; all
    gradients have to pass it.
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
        self.unscale: Tensor | None = None  # [K, E]: what gradients have to be multiplied with, where they are scaled
        self.takes_roots = True  # unless a layer cannot multiply by them
        self._places: dict[str, Place] = {}
        begin = 0
        for slot in slots:
            if slot.channels_last:
                raise UnsupportedError("a convolution in channels-last order")
            self._places[slot.name] = (begin, begin + slot.numel)
            begin += slot.numel
        self._used: set[str] = set()
        self._filled: set[Place] = set()

    def computed(self, output: Tensor, used: set[str]) -> Tensor:
        """Scale the gradients of what leaves the network."""
        if self._scales_at not in used:
            return output
        result: Tensor = _Scaled.apply(output, self.scaled)  # type: ignore[no-untyped-call]
        return result

    def scaled(self, grad: Tensor) -> Tensor:
        """The gradient of the logits [K, N, classes], scaled."""
        result, self.unscale, self.rows.roots = scale(grad, self.n_envs, by_row=self.takes_roots and split_products())
        return result

    def claim(self, *params: Tensor | None) -> tuple[Place, ...]:
        """Where a layer's parameters are. Each may be claimed once, and all of a layer's have to be watched."""
        names = [self.names.get(id(param), "") for param in params]
        if "" in names or len(set(names)) < len(names) or self._used & set(names):
            raise UnsupportedError("a parameter is used twice, or without the other ones of its layer")
        self._used.update(names)
        return tuple(self._places[name] for name in names)

    def check_rows(self, x: Tensor, ndim: int) -> None:
        """A layer's input should still have one row per example, those of an environment together."""
        if x.ndim != ndim or x.shape[0] % self.n_envs:
            raise UnsupportedError(f"a layer's input has the shape {tuple(x.shape)}")

    def target(self, *places: Place) -> Tensor:
        """Where moments go that a layer computes itself: sums of signs, means and M2 [3, K, P]; of one place, its own.

        The layer has to write all of these places.
        """
        self._filled.update(places)
        return self._buffers[..., slice(*places[0])] if len(places) == 1 else self._buffers

    def fold(self, place: Place, gradients: Callable[[slice], Tensor]) -> None:
        """Fold `gradients(runs)` [k, E, ...] of some runs after the other into a parameter's moments."""
        targets = self.target(place)
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
        """The folded moments [K, P]; zeros for unused parameters."""
        for place in set(self._places.values()) - self._filled:
            self._buffers[..., slice(*place)] = 0.0
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
