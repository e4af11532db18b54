"""A hidden layer, relu(dropout(W x + b)): as plain operations, or as two kernels for K runs at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask._physical import has_kernels, in_vmap, leading
from sandmask.functional.dropout import Dropout

ALIGNED = 16  # what widths are multiples of inside products on a GPU
PART = 512  # rows that one program sums a bias's gradient over, where environments do not matter


def dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0) -> Tensor:
    """relu(dropout(x W^T + b)) of x [N, in].

    On a GPU the result may have more units than W has rows, all zero, and `x` more than W has columns: a width that is
    a multiple of 16 lets matrix products use the fast units, and kernels read several numbers at a time.
    """
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(dense, (x, weight, bias), x, weight, bias, drop=drop, site=site)
        return result
    if not has_kernels(x):
        return plain_dense(x, weight, bias, drop, site)
    rows, rate = (None, None) if drop is None else (drop.rows, drop.rate)
    return _apply(*aligned(x, weight, bias), rows, rate, site=site)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b; `x` may come from `dense`, and the result may then be wider in the same way."""
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(affine, (x, weight, bias), x, weight, bias)
        return result
    if x.shape[-1] == weight.shape[-1]:
        return F.linear(x, weight, bias)
    return F.linear(*aligned(x, weight, bias))


def plain_dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """The same by torch's own operations, which work under any transform."""
    y = F.linear(x, weight, bias)
    return torch.relu(y if drop is None else drop(y, site))


def wide(width: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -width % ALIGNED + width


def aligned(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's tensors with zeros added, so that both of its sides are multiples of `ALIGNED`."""
    n_out, n_in = weight.shape
    wide_out, wide_in = wide(n_out), max(wide(n_in), x.shape[-1])
    if x.shape[-1] != wide_in:
        x = F.pad(x, (0, wide_in - x.shape[-1]))
    if (wide_out, wide_in) != (n_out, n_in):
        weight = F.pad(weight, (0, wide_in - n_in, 0, wide_out - n_out))
    return x, weight, bias if wide_out == n_out else F.pad(bias, (0, wide_out - n_out))


def aligned_runs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for tensors of K runs, by kernels, without a gradient to weight and bias."""
    from sandmask.functional import kernels

    _, n_out, n_in = weight.shape
    wide_out, wide_in = wide(n_out), max(wide(n_in), x.shape[-1])
    if x.shape[-1] != wide_in:
        wider = wide_in - x.shape[-1]
        x = F.pad(x, (0, wider)) if x.requires_grad else kernels.pad(x, x.shape[1], wide_in)
    return x, kernels.pad(weight, wide_out, wide_in), kernels.pad(bias.unsqueeze(1), 1, wide_out).squeeze(1)


def _apply(*tensors: Tensor | None, site: int) -> Tensor:
    """Inside of `vmap` as it is, outside as a stack of one run."""
    if in_vmap():
        y: Tensor = _Dense.apply(*tensors, site)  # type: ignore[no-untyped-call]
        return y
    one: Tensor = _Dense.apply(*(t if t is None else t.unsqueeze(0) for t in tensors), site)  # type: ignore[no-untyped-call]
    return one.squeeze(0)


class _Dense(Function):
    """Of K runs: inside of `vmap` it is called again with the leading dimension."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None, rate: Tensor | None, site: int) -> Tensor:
        return dense_of_runs(x, weight, bias, rows, rate, site)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, _, rate, _ = inputs
        ctx.save_for_backward(x, weight, output, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, out, rate = ctx.saved_tensors
        before, sums = dense_backward(grad, out, rate)
        of_x = torch.bmm(before, weight) if ctx.needs_input_grad[0] else None
        return of_x, torch.bmm(before.mT, x), sums.sum(1).to(out.dtype), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        y: Tensor = _Dense.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return y, 0


def dense_of_runs(
    x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None, rate: Tensor | None, site: int
) -> Tensor:
    """Of x [K, N, in], weight [K, out, in], bias [K, out], rows [K, N], rate [K]; on any device."""
    if has_kernels(x):
        from sandmask.functional import kernels

        return kernels.activate(torch.bmm(x, weight.mT), bias, rows, rate, site)
    y = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    if rows is not None and rate is not None:
        y = Dropout(rate.view(-1, 1, 1), rows)(y, site).to(y.dtype)
    return y.relu()


def dense_backward(grad: Tensor, out: Tensor, rate: Tensor | None, n_envs: int | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of x W^T + b, from that of the layer's output [K, N, out] and the output itself.

    Beside it, its sums over rows: of each environment [K, E, out], or else of as many parts as suits.
    A unit that is positive was kept, and scaled by 1 / (1 - rate); one that is zero passes nothing on.
    """
    if has_kernels(out):
        from sandmask.functional import kernels

        return kernels.activate_backward(grad, out, rate, PART if n_envs is None else out.shape[1] // n_envs)
    scaled = grad if rate is None else grad / (1.0 - rate.view(-1, 1, 1))
    # Of an output that is no number, the gradient is not zeroed.
    before = torch.ops.aten.threshold_backward(scaled.to(out.dtype), out, 0)
    return before, before.unflatten(1, (n_envs or 1, -1)).sum(2)
