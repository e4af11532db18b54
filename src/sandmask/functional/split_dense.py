"""A dense layer of K runs by kernels that multiply halves: see `split`. `dense` chooses between it and other ways."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sandmask._physical import apply_to_runs, has_kernels, leading
from sandmask.functional.split import Halves, split_products

NARROWEST = 32  # sides of a weight matrix from which on products of halves pay
PART = 512  # rows that one program sums a bias's gradient over, where environments do not matter

# Takes over the gradients of the parameters: gets the gradient of x W^T + b [K, N, out], its sums over the rows of each
# environment [K, E, out], and x [K, N, in].
Fold = Callable[[Halves, Tensor, Halves], None]


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether products of halves are wanted, possible and worth it for a layer with this weight [out, in]."""
    exact = x.dtype == weight.dtype == torch.float32
    return split_products() and exact and min(weight.shape) >= NARROWEST and has_kernels(x)


def split_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rows: Tensor | None,
    rate: Tensor | None,
    site: int,
    relu: bool,
    n_envs: int | None = None,
    fold: Fold | None = None,
) -> Tensor:
    """relu(dropout(x W^T + b)), or x W^T + b, as `dense` and `affine` have it: the result may be wider, by zeros."""
    return apply_to_runs(_SplitLayer, (x, weight, bias, rows, rate), (site, relu, n_envs, fold))


class _SplitLayer(Function):
    """Of K runs: inside of `vmap` it is called again with the leading dimension.

    Beside the layer's result it returns its factors in halves, for the backward pass; nothing else may look at these.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor | None,
        rate: Tensor | None,
        site: int,
        relu: bool,
        n_envs: int | None,  # noqa: ARG004 - as the next
        fold: Fold | None,  # noqa: ARG004 - for the backward pass
    ) -> tuple[Tensor, ...]:
        from sandmask.functional.dense import wide
        from sandmask.functional.kernels import products
        from sandmask.functional.kernels.dense import pad
        from sandmask.functional.kernels.split import split

        (_, n_out, n_in), (_, n_rows, width) = weight.shape, x.shape
        wide_out, wide_in = wide(n_out), max(wide(n_in), width)
        inputs, own = split(x, n_rows, wide_in), split(weight, wide_out, wide_in)
        wide_bias = pad(bias.unsqueeze(1), 1, wide_out).squeeze(1)
        return products.layer(inputs, own, wide_bias, rows, rate, site, relu), *inputs, *own

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        x, weight, _, _, rate, _, relu, ctx.n_envs, ctx.fold = inputs
        ctx.sizes = (weight.shape[1], weight.shape[2], x.shape[2])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rate, output[0] if relu else None, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
        if grad is None:
            return (None,) * 9
        from sandmask.functional.kernels import products

        rate, out, *factors = ctx.saved_tensors
        inputs, own = Halves(*factors[:2]), Halves(*factors[2:])
        n_out, n_in, width = ctx.sizes
        before, sums = _before(grad, out, rate, ctx.n_envs)
        of_x = products.input_gradient(before, own)[..., :width] if ctx.needs_input_grad[0] else None
        if ctx.fold is not None:
            ctx.fold(before, sums, inputs)
            return of_x, *[None] * 8
        of_weight = products.weight_gradient(before, inputs)[:, :n_out, :n_in]
        return of_x, of_weight, sums.sum(1)[:, :n_out], *[None] * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = _SplitLayer.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


def _before(grad: Tensor, out: Tensor | None, rate: Tensor | None, n_envs: int | None) -> tuple[Halves, Tensor]:
    """As `dense.layer_backward`, in halves."""
    from sandmask.functional.kernels.dense import activate_backward_halves
    from sandmask.functional.kernels.split import split

    n_rows = grad.shape[1]
    part = PART if n_envs is None else n_rows // n_envs
    if out is not None:
        return activate_backward_halves(grad, out, rate, part)
    return split(grad.contiguous()), grad.reshape(len(grad), n_envs or 1, -1, grad.shape[2]).sum(2)
