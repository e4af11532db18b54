"""A hidden layer, relu(dropout(W x + b)), in torch's operations or in kernels for K runs.

There are two sets of kernels. One uses torch's matrix products. The other has its own products, whose factors are
split into two float16 numbers ("halves"; see `split`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask._physical import RunsFunction, apply_to_runs, has_kernels
from sandmask.functional import random
from sandmask.functional.split import Halves, split_products

ALIGNED = 16  # on a GPU, widths are padded to multiples of this
NARROWEST = 32  # smallest side of a weight matrix for products of halves; for smaller sides, float32 is more exact
MOST_ROWS = 64 * 65_535  # limit of rows per run, because tiles of rows are the second dimension of CUDA's grids
PART = 512  # rows over which one program sums the gradients of parameters, if environments are not kept apart

# Computes moments instead of the gradients of the parameters. Its arguments are the gradient of x W^T + b [K, N, out],
# the sums of this gradient over the rows of each environment [K, E, out], and x [K, N, in].
Fold = Callable[[Tensor | Halves, Tensor, Tensor | Halves], None]


@dataclass
class Rows:
    """The rows of a layer's input for a `Fold`, sorted by environment.

    `roots` are factors that keep gradients in the range of the halves. The gradient of each row is divided by its root,
    and sums over rows multiply by the root. See `scaling`.
    """

    n_envs: int
    roots: Tensor | None = None  # [K, N]; set in the backward pass


@dataclass(frozen=True)
class Dropout:
    """Dropout whose noise depends on the example and not on its position in a batch.

    :param rate: probability that a unit is dropped, a tensor with one number per run.
    :param keys: a random key for each example, [N].
    """

    rate: Tensor
    keys: Tensor

    def __call__(self, x: Tensor, site: int) -> Tensor:
        """Drop units of x `[N, features]`. Each layer of the network has another number `site`, and its own noise."""
        noise = random.uniform(random.fold(self.keys, site), x.shape[-1])
        return torch.where(noise >= self.rate, x / (1.0 - self.rate), 0.0)


def dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0) -> Tensor:
    """relu(dropout(x W^T + b)) of x [N, in].

    On a GPU, the result may be padded with zeros to a multiple of 16 units, which is faster. `x` may also be padded.

    In float16, results that are too large become the largest float16 number: infinity would end a run that continues in
    float32.
    """
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(dense, (x, weight, bias), x, weight, bias, drop=drop, site=site)
        return result
    if not has_kernels(x):
        return plain_dense(x, weight, bias, drop, site)
    keys, rate = (None, None) if drop is None else (drop.keys, drop.rate)
    return apply_to_runs(layer_function(x, weight), (x, weight, bias, keys, rate), (site, True, None, None))


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b. As in `dense`, `x` and the result may be padded with zeros."""
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(affine, (x, weight, bias), x, weight, bias)
        return result
    if not has_kernels(x):
        return F.linear(x[..., : weight.shape[-1]], weight, bias)
    return apply_to_runs(layer_function(x, weight), (x, weight, bias, None, None), (0, False, None, None))


def plain_dense(x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """`dense` in torch's operations, which work under any transform of `torch.func`."""
    y = F.linear(x, weight, bias)
    return saturated(torch.relu(y if drop is None else drop(y, site)))


def wide(width: int) -> int:
    """The smallest multiple of `ALIGNED` that is at least `width`."""
    return -width % ALIGNED + width


def aligned(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of a layer of K runs, on a GPU padded with zeros to multiples of `ALIGNED`."""
    if not has_kernels(x):
        return x, weight, bias
    from sandmask.functional.kernels import dense as dense_kernels

    _, n_out, n_in = weight.shape
    wide_out, wide_in = wide(n_out), max(wide(n_in), x.shape[2])
    wide_bias = dense_kernels.pad(bias.unsqueeze(1), 1, wide_out).squeeze(1)
    return dense_kernels.pad(x, x.shape[1], wide_in), dense_kernels.pad(weight, wide_out, wide_in), wide_bias


def layer_function(x: Tensor, weight: Tensor) -> type[Function]:
    """Choose the autograd function that computes a layer of K runs.

    The arguments of the function are x, weight, bias, the keys and the rate of dropout (or None), the site of dropout,
    whether there is a ReLU, and for moments also `Rows` and a `Fold`.

    :param x: input of the layer, [..., N, in].
    :param weight: weight of the layer, [out, in].
    """
    exact = x.dtype == weight.dtype == torch.float32
    fits = min(weight.shape) >= NARROWEST and x.shape[-2] <= MOST_ROWS
    return _SplitLayer if split_products() and exact and fits and has_kernels(x) else _Layer


class _Layer(RunsFunction):
    """A layer of K runs with torch's matrix products. Under `vmap`, it takes the tensors of all runs at once."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        keys: Tensor | None,
        rate: Tensor | None,
        site: int,
        relu: bool,
        rows: Rows | None,  # noqa: ARG004 - for the backward pass
        fold: Fold | None,  # noqa: ARG004 - for the backward pass
    ) -> Tensor:
        fits = weight.shape[2] < NARROWEST and x.shape[1] <= MOST_ROWS
        if relu and has_kernels(x) and fits and x.dtype == weight.dtype == torch.float32:
            from sandmask.functional.kernels import dense as dense_kernels

            return dense_kernels.narrow_layer(x, weight, bias, keys, rate, site, wide(weight.shape[1]))
        return layer_of_runs(*aligned(x, weight, bias), keys, rate, site, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, _, rate, _, relu, ctx.rows, ctx.fold = inputs
        ctx.save_for_backward(x, weight, bias, output if relu else None, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, out, rate = ctx.saved_tensors
        wide_x, wide_weight, _ = aligned(x, weight, bias)
        before, sums = layer_backward(grad, out, rate, *_environments(ctx.rows))
        of_weight = of_bias = None
        if ctx.fold is not None:
            ctx.fold(before, sums, wide_x)
        else:
            of_weight = torch.bmm(before.mT, wide_x)[:, : weight.shape[1], : weight.shape[2]]
            of_bias = sums.sum(1)[:, : bias.shape[1]].to(bias.dtype)
        of_x = torch.bmm(before, wide_weight)[..., : x.shape[2]] if ctx.needs_input_grad[0] else None
        return of_x, of_weight, of_bias, *[None] * 6


class _SplitLayer(RunsFunction):
    """A layer of K runs with products of halves.

    After the result, it returns the halves of x and weight. They are outputs only because they are saved for the
    backward pass.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        keys: Tensor | None,
        rate: Tensor | None,
        site: int,
        relu: bool,
        rows: Rows | None,  # noqa: ARG004 - for the backward pass
        fold: Fold | None,  # noqa: ARG004 - for the backward pass
    ) -> tuple[Tensor, ...]:
        from sandmask.functional.kernels import products
        from sandmask.functional.kernels.dense import pad
        from sandmask.functional.kernels.split import split

        (_, n_out, n_in), (_, n_rows, width) = weight.shape, x.shape
        wide_out, wide_in = wide(n_out), max(wide(n_in), width)
        inputs, own = split(x, n_rows, wide_in), split(weight, wide_out, wide_in)
        wide_bias = pad(bias.unsqueeze(1), 1, wide_out).squeeze(1)
        return products.layer(inputs, own, wide_bias, keys, rate, site, relu), *inputs, *own

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        x, weight, _, _, rate, _, relu, ctx.rows, ctx.fold = inputs
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
        before, sums = _split_backward(grad, out, rate, *_environments(ctx.rows))
        of_x = products.input_gradient(before, own) if ctx.needs_input_grad[0] else None
        if of_x is not None and of_x.shape[2] > width:
            of_x = of_x[..., :width]
        if ctx.fold is not None:
            ctx.fold(before, sums, inputs)
            return of_x, *[None] * 8
        of_weight = products.weight_gradient(before, inputs)[:, :n_out, :n_in]
        return of_x, of_weight, sums.sum(1)[:, :n_out], *[None] * 6


def _environments(rows: Rows | None) -> tuple[int | None, Tensor | None]:
    return (None, None) if rows is None else (rows.n_envs, rows.roots)


def _split_backward(
    grad: Tensor, out: Tensor | None, rate: Tensor | None, n_envs: int | None, roots: Tensor | None
) -> tuple[Halves, Tensor]:
    """`layer_backward` for `_SplitLayer`. It returns the gradient as halves."""
    from sandmask.functional.kernels.dense import activate_backward_halves
    from sandmask.functional.kernels.split import split

    if out is None:
        return split(grad.contiguous()), by_environment(weighted(grad, roots), n_envs or 1).sum(2)
    return activate_backward_halves(grad, out, rate, _rows_of_a_part(out, n_envs), roots)


def layer_of_runs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    keys: Tensor | None = None,
    rate: Tensor | None = None,
    site: int = 0,
    relu: bool = True,
) -> Tensor:
    """`dense` (or `affine`, without `relu`) of K runs, on any device.

    Shapes are x [K, N, in], weight [K, out, in], bias [K, out], keys [K, N] and rate [K].
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
    """Replace infinity in float16 by the largest float16 number. NaN stays NaN."""
    largest = torch.finfo(values.dtype).max
    return values.clamp(-largest, largest) if values.dtype == torch.float16 else values


def layer_backward(
    grad: Tensor, out: Tensor | None, rate: Tensor | None, n_envs: int | None = None, roots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x W^T + b [K, N, out], and its sums over the rows of each environment [K, E, out].

    Dropout kept the positive outputs and multiplied them by 1 / (1 - rate). An output of zero has no gradient.

    :param grad: gradient of the layer's output [K, N, out].
    :param out: the output, or None without ReLU.
    :param rate: rate of dropout, or None.
    :param n_envs: number of environments; if not given, the sums are over arbitrary parts of the rows.
    :param roots: factors [K, N] of the rows in the sums: see `Rows`.
    """
    if out is not None and has_kernels(out):
        from sandmask.functional.kernels import dense as dense_kernels

        return dense_kernels.activate_backward(grad, out, rate, _rows_of_a_part(out, n_envs), roots)
    before = grad
    if out is not None:
        scaled = grad if rate is None else grad / (1.0 - rate.view(-1, 1, 1))
        # The gradient of an output that is NaN is not set to zero.
        before = saturated(torch.ops.aten.threshold_backward(scaled.to(out.dtype), out, 0))
    exact = torch.promote_types(before.dtype, torch.float32)
    return before, by_environment(weighted(before, roots), n_envs or 1).sum(2, dtype=exact)


def weighted(rows: Tensor, roots: Tensor | None) -> Tensor:
    """Rows [K, N, n] times their roots."""
    return rows if roots is None else rows * roots.unsqueeze(-1)


def by_environment(rows: Tensor, n_envs: int) -> Tensor:
    """[K, E * B, n] as [K, E, B, n]."""
    return rows.reshape(len(rows), n_envs, -1, rows.shape[2])


def _rows_of_a_part(out: Tensor, n_envs: int | None) -> int:
    """The number of rows of [K, N, out] that are summed together."""
    return PART if n_envs is None else out.shape[1] // n_envs
