"""Moments over environments of every weight's gradient, for K runs, from one forward and one backward pass.

The gradient with respect to a layer's input is the same whoever asks for it; only the gradients of its weights have to
be kept apart by environment. Here they are folded into moments in the layer's backward pass, and go no further.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sandmask._physical import has_kernels, leading
from sandmask.functional.dense import affine, aligned, dense, dense_backward, dense_of_runs
from sandmask.functional.dropout import Dropout
from sandmask.functional.flat import Slot
from sandmask.masks import TensorMoments, stack_moments

# On a CPU, runs are taken together as long as all their environments' gradients of a layer stay in the cache.
CACHED = 2**18
SMALLEST = 16  # sides of a weight matrix from which on the kernel pays


Layer = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # its sides; where its weight and bias are


class UntapedError(Exception):
    """A parameter is used in a way that this tape knows nothing of."""


class MomentTape(TorchFunctionMode):
    """While active, inside `vmap`, layers that use watched parameters fold their gradients into moments [K, P]."""

    def __init__(self, slots: Sequence[Slot], n_runs: int, n_envs: int, like: Tensor) -> None:
        super().__init__()
        self.n_envs = n_envs
        numel = sum(slot.numel for slot in slots)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self._buffers = torch.zeros(3, n_runs, numel, dtype=dtype, device=like.device)  # sign sums, means, M2
        self._places: dict[str, tuple[int, int]] = {}
        begin = 0
        for slot in slots:
            if slot.channels_last:
                raise UntapedError("a convolution in channels-last order")
            self._places[slot.name] = (begin, begin + slot.numel)
            begin += slot.numel
        self._names: dict[int, str] = {}
        self._used: set[str] = set()

    def watch(self, params: Mapping[str, Tensor]) -> "MomentTape":
        """Whose gradients to fold; each may be used once."""
        self._params = params  # kept alive: an id is only good as long as its object lives
        self._names = {id(param): name for name, param in params.items()}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute layers in our own way; refuse parameters that turn up anywhere else."""
        kwargs = kwargs or {}
        if not any(id(leaf) in self._names for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is dense:
            return self._layer(*args, **kwargs, relu=True)
        if func in (F.linear, affine):
            return self._layer(*args, **kwargs, relu=False)
        if getattr(func, "__name__", "") == "__get__":  # reads an attribute, such as `weight.shape`
            return func(*args, **kwargs)
        raise UntapedError(f"a parameter is used by {getattr(func, '__name__', func)}")

    def _layer(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        drop: Dropout | None = None,
        site: int = 0,
        *,
        relu: bool,
    ) -> Any:
        if x.ndim != 2 or bias is None or x.shape[0] % self.n_envs:
            raise UntapedError(f"a layer's input has the shape {tuple(x.shape)}")
        names = {self._names.get(id(param), "") for param in (weight, bias)}
        if "" in names or names & self._used:
            raise UntapedError("a parameter is used twice, or without the other one of its layer")
        self._used |= names
        places = tuple(self._places[self._names[id(param)]] for param in (weight, bias))
        noise = (None, None) if drop is None else (drop.rows, drop.rate)
        sizes = (weight.shape[0], weight.shape[1])
        if has_kernels(x):
            x, weight, bias = aligned(x, weight, bias)
        how = (site, relu, self.fold, (sizes, *places))
        y: Tensor = _TapedLayer.apply(x, weight, bias, *noise, *how)  # type: ignore[no-untyped-call]
        return y if relu else y[..., : sizes[0]]

    def fold(self, layer: Layer, grad: Tensor, x: Tensor) -> None:
        """Fold the gradients of a layer's weight, grad_e^T x_e, and of its bias, the sums of grad_e."""
        (n_out, n_in), weight, bias = layer
        by_env = grad.reshape(len(grad), self.n_envs, -1, grad.shape[2])[..., :n_out]
        self._fold(bias, lambda runs: by_env[runs].sum(2))
        if has_kernels(grad) and min(n_out, n_in) >= SMALLEST:
            from sandmask.functional import kernels

            kernels.weight_moments(grad, x, self.n_envs, (n_out, n_in), *self._buffers[..., slice(*weight)])
            return
        x_by_env = x.reshape(len(x), self.n_envs, -1, x.shape[2])[..., :n_in]
        self._fold(weight, lambda runs: by_env[runs].mT @ x_by_env[runs])

    def _fold(self, place: tuple[int, int], gradients: Callable[[slice], Tensor]) -> None:
        """Fold `gradients(runs)` [k, E, ...] of some runs after the other."""
        targets = self._buffers[..., slice(*place)]
        n_runs = together = targets.shape[1]
        if targets.device.type == "cpu":
            together = max(CACHED // (self.n_envs * targets.shape[2]), 1)
        for begin in range(0, n_runs, together):
            runs = slice(begin, begin + together)
            moments = stack_moments(gradients(runs).transpose(0, 1).flatten(2))
            for target, value in zip(targets, (moments.sign_sum, moments.mean, moments.m2), strict=True):
                target[runs] = value

    def moments(self) -> TensorMoments:
        """What was folded: [K, P]. Parameters that were not used have zeros."""
        return TensorMoments(self.n_envs, *self._buffers)


class _TapedLayer(Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor | None,
        rate: Tensor | None,
        site: int,
        relu: bool,
        fold: Any,  # noqa: ARG004 - for the backward pass
        layer: Layer,  # noqa: ARG004
    ) -> Tensor:
        if relu:
            return dense_of_runs(x, weight, bias, rows, rate, site)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, _, rate, _, ctx.relu, ctx.fold, ctx.layer = inputs
        ctx.save_for_backward(x, weight, output if ctx.relu else None, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, out, rate = ctx.saved_tensors
        before = dense_backward(grad, out, rate) if ctx.relu else grad
        ctx.fold(ctx.layer, before, x)
        of_x = torch.bmm(before, weight) if ctx.needs_input_grad[0] else None
        return of_x, *[None] * 8

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        y: Tensor = _TapedLayer.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return y, 0
