"""A hidden layer, relu(dropout(W x + b)): as plain operations, or as two kernels for K runs at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask._physical import apply_to_runs, has_kernels, leading
from sandmask.functional import split_dense
from sandmask.functional.dropout import Dropout

ALIGNED = 16  # what widths are multiples of inside products on a GPU


def dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0) -> Tensor:
    """relu(dropout(x W^T + b)) of x [N, in].

    On a GPU the result may have more units than W has rows, all zero, and `x` more than W has columns: a width that is
    a multiple of 16 lets matrix products use the fast units, and kernels read several numbers at a time.

    In float16, units that would exceed its range get its largest number: infinity would end a run that continues in
    float32.
    """
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(dense, (x, weight, bias), x, weight, bias, drop=drop, site=site)
        return result
    if not has_kernels(x):
        return plain_dense(x, weight, bias, drop, site)
    keys, rate = (None, None) if drop is None else (drop.keys, drop.rate)
    return _apply(x, weight, bias, keys, rate, how=(site, True))


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b; `x` may come from `dense`, and the result may be wider in the same way."""
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(affine, (x, weight, bias), x, weight, bias)
        return result
    if not has_kernels(x):
        return F.linear(x[..., : weight.shape[-1]], weight, bias)
    return _apply(x, weight, bias, None, None, how=(0, False))


def plain_dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """The same by torch's own operations, which work under any transform."""
    y = F.linear(x, weight, bias)
    return saturated(torch.relu(y if drop is None else drop(y, site)))


def wide(width: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -width % ALIGNED + width


def aligned(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's tensors of K runs with zeros added, so that on a GPU both of its sides are multiples of `ALIGNED`."""
    if not has_kernels(x):
        return x, weight, bias
    from sandmask.functional.kernels import dense as dense_kernels

    _, n_out, n_in = weight.shape
    wide_out, wide_in = wide(n_out), max(wide(n_in), x.shape[2])
    wide_bias = dense_kernels.pad(bias.unsqueeze(1), 1, wide_out).squeeze(1)
    return dense_kernels.pad(x, x.shape[1], wide_in), dense_kernels.pad(weight, wide_out, wide_in), wide_bias


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None, rate: Tensor | None, how: tuple[int, bool]
) -> Tensor:
    if split_dense.pays(x, weight):
        return split_dense.split_layer(x, weight, bias, rows, rate, *how)
    return apply_to_runs(_Dense, (x, weight, bias, rows, rate), how)


class _Dense(Function):
    """Of K runs: inside of `vmap` it is called again with the leading dimension."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, keys: Tensor | None, rate: Tensor | None, site: int, relu: bool
    ) -> Tensor:
        return layer_of_runs(*aligned(x, weight, bias), keys, rate, site, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, _, rate, _, ctx.relu = inputs
        ctx.save_for_backward(x, weight, bias, output if ctx.relu else None, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, out, rate = ctx.saved_tensors
        wide_x, wide_weight, _ = aligned(x, weight, bias)
        before, sums = layer_backward(grad, out, rate)
        of_x = torch.bmm(before, wide_weight)[..., : x.shape[2]] if ctx.needs_input_grad[0] else None
        of_weight = torch.bmm(before.mT, wide_x)[:, : weight.shape[1], : weight.shape[2]]
        return of_x, of_weight, sums.sum(1)[:, : bias.shape[1]].to(bias.dtype), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        y: Tensor = _Dense.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return y, 0


def layer_of_runs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    keys: Tensor | None = None,
    rate: Tensor | None = None,
    site: int = 0,
    relu: bool = True,
) -> Tensor:
    """`dense` of K runs: x [K, N, in], weight [K, out, in], bias [K, out], keys [K, N] and rate [K], on any device.

    Without `relu` it is x W^T + b.
    """
    if not relu:
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    if has_kernels(x):
        from sandmask.functional.kernels import dense as dense_kernels

        return dense_kernels.activate(torch.bmm(x, weight.mT), bias, keys, rate, site)
    y = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    if keys is not None and rate is not None:
        y = Dropout(rate.view(-1, 1, 1), keys)(y, site).to(y.dtype)
    return saturated(y.relu())


def saturated(values: Tensor) -> Tensor:
    """In float16, its largest number instead of infinity; NaN stays visible."""
    largest = torch.finfo(values.dtype).max
    return values.clamp(-largest, largest) if values.dtype == torch.float16 else values


def layer_backward(
    grad: Tensor, out: Tensor | None, rate: Tensor | None, n_envs: int | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of x W^T + b, from that of the layer's output [K, N, out] and, after a relu, the output itself.

    Also returns its sums over the rows of each environment [K, E, out], or without environments over parts of them.
    A positive unit was kept and scaled by 1 / (1 - rate); a unit that is zero has no gradient.
    """
    if out is not None and has_kernels(out):
        from sandmask.functional.kernels import dense as dense_kernels

        part = split_dense.PART if n_envs is None else out.shape[1] // n_envs
        return dense_kernels.activate_backward(grad, out, rate, part)
    before = grad
    if out is not None:
        scaled = grad if rate is None else grad / (1.0 - rate.view(-1, 1, 1))
        # The gradient of a NaN output is not set to zero.
        before = saturated(torch.ops.aten.threshold_backward(scaled.to(out.dtype), out, 0))
    exact = torch.promote_types(before.dtype, torch.float32)
    return before, by_environment(before, n_envs or 1).sum(2, dtype=exact)


def by_environment(rows: Tensor, n_envs: int) -> Tensor:
    """[K, E * B, n] as [K, E, B, n]."""
    return rows.reshape(len(rows), n_envs, -1, rows.shape[2])
