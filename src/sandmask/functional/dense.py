"""A hidden layer, relu(dropout(W x + b)): as plain operations, or as two kernels for K runs at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask._physical import has_kernels, in_vmap, leading
from sandmask.functional.dropout import Dropout


def dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0) -> Tensor:
    """relu(dropout(x W^T + b)) of x [N, in]."""
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(dense, (x, weight, bias), x, weight, bias, drop=drop, site=site)
        return result
    return dense_by_kernels(x, weight, bias, drop, site) if has_kernels(x) else plain_dense(x, weight, bias, drop, site)


def plain_dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """The same by torch's own operations, which work under any transform."""
    y = F.linear(x, weight, bias)
    return torch.relu(y if drop is None else drop(y, site))


def dense_by_kernels(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """The same by `functional.kernels`; outside of `vmap` as a stack of one run."""
    rows, rate = (None, None) if drop is None else (drop.rows, drop.rate)
    tensors = (x, weight, bias, rows, rate)
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
        before = dense_backward(grad, out, rate)
        of_x = torch.bmm(before, weight) if ctx.needs_input_grad[0] else None
        return of_x, torch.bmm(before.mT, x), before.sum(1), None, None, None

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


def dense_backward(grad: Tensor, out: Tensor, rate: Tensor | None) -> Tensor:
    """The gradient of x W^T + b, from that of the layer's output [K, N, out] and the output itself.

    A unit that is positive was kept, and scaled by 1 / (1 - rate); one that is zero passes nothing on.
    """
    if has_kernels(out):
        from sandmask.functional import kernels

        return kernels.activate_backward(grad, out, rate)
    scaled = grad if rate is None else grad / (1.0 - rate.view(-1, 1, 1))
    return torch.where(out > 0, scaled, torch.where(out == 0, 0.0, out)).to(out.dtype)
