"""Replacements for torch's layers that keep the gradients of their weights apart by environment.

Each layer is an `autograd.Function`. Its backward pass returns the gradient with respect to the input, and gives the
gradients of the weights to the tape.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask._scratch import scratch_product
from sandmask.gradients._tape import UnsupportedError

if TYPE_CHECKING:
    from sandmask.gradients._one_pass import OnePass


# Saved with the tensors of each layer. `torch.utils.checkpoint` repeats a forward pass without the tape, and compares
# the dtypes and shapes of saved tensors: a layer of torch never saves a tensor like this one.
MARK = torch.empty(0, 1, 0, dtype=torch.uint8, device="cpu")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: "OnePass", x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.tape, ctx.params = tape, (weight, bias)
        x, weight, bias = _autocast(x, weight, bias)
        ctx.save_for_backward(x, weight, MARK)
        output = F.linear(x, weight, bias)
        # The output may be a view of a matrix, and a view that a function returns cannot be changed in place.
        no_view: Tensor = torch.ops.aten._unsafe_view(output, output.shape)  # noqa: SLF001
        return no_view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        tape, (own_weight, own_bias) = ctx.tape, ctx.params
        tape.add(own_weight, lambda: _weight_products(tape, grad, x.conj()))
        tape.add(own_bias, lambda: tape.sums(grad, range(1, grad.ndim - 1)))
        return None, grad @ weight.conj() if ctx.needs_input_grad[1] else None, None, None


def _weight_products(tape: "OnePass", grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x of each environment, as one batched product if all have the same number of rows."""
    if len(set(tape.sizes)) > 1:
        return tape.by_environment(lambda g, v: g.flatten(0, -2).T @ v.flatten(0, -2), grad, x)
    n_envs = len(tape.sizes)
    grad, x = (t.reshape(n_envs, t.shape[:-1].numel() // n_envs, t.shape[-1]) for t in (grad, x))
    # If gradients are folded, the product is needed only until then, so its memory is used again.
    return scratch_product(grad.mT, x) if tape.folds else grad.mT @ x


class _Convolution(torch.autograd.Function):
    """A convolution of any dimension. `how` is stride, padding, dilation, transposed, output padding and groups."""

    @staticmethod
    def forward(ctx: Any, tape: "OnePass", x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        ctx.tape, ctx.params, ctx.how = tape, (weight, bias), how
        x, weight, bias = _autocast(x, weight, bias)
        ctx.save_for_backward(x, weight, MARK)
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        tape, (own_weight, own_bias) = ctx.tape, ctx.params
        backward, how = torch.ops.aten.convolution_backward, (None, *ctx.how)

        def of_weight(g: Tensor, v: Tensor) -> Tensor:
            of_one: Tensor = backward(g, v, weight, *how, [False, True, False])[1]
            return of_one

        tape.add(own_weight, lambda: tape.each_environment(of_weight, grad, x))
        tape.add(own_bias, lambda: tape.sums(grad, range(2, x.ndim)))
        of_x = backward(grad, x, weight, *how, [True, False, False])[0] if ctx.needs_input_grad[1] else None
        return None, of_x, *[None] * (2 + len(ctx.how))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: "OnePass", ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.tape, ctx.param, ctx.padding = tape, weight, padding
        ctx.save_for_backward(ids, MARK)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ids, _ = ctx.saved_tensors
        weight, padding = ctx.param, -1 if ctx.padding is None else ctx.padding
        of_rows = torch.ops.aten.embedding_dense_backward

        def of_weight(g: Tensor, i: Tensor) -> Tensor:
            of_one: Tensor = of_rows(g, i, len(weight), padding, False)
            return of_one

        ctx.tape.add(weight, lambda: ctx.tape.each_environment(of_weight, grad.contiguous(), ids))
        return None, None, None, None


class _FrozenBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: "OnePass", x: Tensor, *own: Any) -> Tensor:
        mean, var, weight, bias, eps = own
        ctx.tape, ctx.params, ctx.eps = tape, (weight, bias), eps
        ctx.save_for_backward(x, mean, var, MARK)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, var, _ = ctx.saved_tensors
        tape, (weight, bias) = ctx.tape, ctx.params
        scale = (var + ctx.eps).rsqrt()
        pixels = range(2, x.ndim)
        sums = tape.sums(grad, pixels, scale.dtype)
        tape.add(bias, lambda: sums)
        tape.add(weight, lambda: (tape.sums(grad * x, pixels, scale.dtype) - mean * sums) * scale)
        if weight is not None:
            scale = scale * weight
        shape = (1, -1, *([1] * (x.ndim - 2)))
        return None, grad * scale.to(grad.dtype).view(shape), None, None, None, None, None


class _Affine(torch.autograd.Function):
    """x * weight + bias along some dimensions: the last part of layer and group normalization."""

    @staticmethod
    def forward(ctx: Any, tape: "OnePass", x: Tensor, weight: Tensor, bias: Tensor | None, shape: Any) -> Tensor:
        ctx.tape, ctx.params, ctx.shape = tape, (weight, bias), shape
        ctx.save_for_backward(x, weight, MARK)
        scaled = x * weight.view(shape)
        return (scaled if bias is None else scaled + bias.view(shape)).to(x.dtype)  # weights may have a wider dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        tape, (own_weight, own_bias) = ctx.tape, ctx.params
        over = [dim for dim, size in enumerate(ctx.shape) if dim > 0 and size == 1]
        tape.add(own_weight, lambda: tape.sums(grad * x, over, weight.dtype).view(-1, *own_weight.shape))
        tape.add(own_bias, lambda: tape.sums(grad, over, weight.dtype).view(-1, *own_weight.shape))
        return None, grad * weight.view(ctx.shape), None, None, None


def _autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """Cast the tensors as autocast would, because autocast has no effect inside of an `autograd.Function`."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, *weights
    dtype = torch.get_autocast_dtype(device)
    return tuple(each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in (x, *weights))


def _linear(tape: "OnePass", input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002
    tape.check_rows(input)
    return _Linear.apply(tape, input, weight, bias)  # type: ignore[no-untyped-call]


def _convolution(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    tape.check_rows(input)
    if input.is_complex():
        raise UnsupportedError("a convolution is complex")
    stride, dilation = _each(stride, weight.ndim - 2), _each(dilation, weight.ndim - 2)
    if padding == "same":
        both = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        more = [p for each in reversed(both) for p in (0, each % 2)]  # odd padding has one more at the end
        input, padding = F.pad(input, more), [each // 2 for each in both]  # noqa: A001
    padding = _each(0 if padding == "valid" else padding, weight.ndim - 2)
    how = (stride, padding, dilation, False, _each(0, weight.ndim - 2), groups)
    return _Convolution.apply(tape, input, weight, bias, *how)  # type: ignore[no-untyped-call]


def _transposed_convolution(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    tape.check_rows(input)
    stride, padding, dilation, more = (_each(v, weight.ndim - 2) for v in (stride, padding, dilation, output_padding))
    how = (stride, padding, dilation, True, more, groups)
    return _Convolution.apply(tape, input, weight, bias, *how)  # type: ignore[no-untyped-call]


def _each(value: Any, n_dims: int) -> list[int]:
    """A number for each dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n_dims if len(values) == 1 else values


def _embedding(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001 - of `max_norm`
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise UnsupportedError("an embedding has max_norm, scale_grad_by_freq or sparse")
    if input.ndim > 1 and input.shape[0] == 1:  # positions that all examples share
        input = input.expand(sum(tape.sizes), *input.shape[1:])  # noqa: A001
    if input.shape[:1] != (sum(tape.sizes),):
        raise UnsupportedError(f"an embedding's input has the shape {tuple(input.shape)}")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return _Embedding.apply(tape, input, weight, padding_idx)  # type: ignore[no-untyped-call]


def _batch_norm(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: ARG001 - it is not, or this would not be called
    momentum: float = 0.1,  # noqa: ARG001 - of training mode
    eps: float = 1e-5,
) -> Any:
    tape.check_rows(input)
    return _FrozenBatchNorm.apply(tape, input, running_mean, running_var, weight, bias, eps)  # type: ignore[no-untyped-call]


def _layer_norm(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    tape.check_rows(input)
    if weight is None:
        raise UnsupportedError("a normalization has a bias without a weight")
    normalized = F.layer_norm(input, normalized_shape, None, None, eps)
    shape = [1] * (input.ndim - len(normalized_shape)) + list(normalized_shape)
    return _Affine.apply(tape, normalized, weight, bias, shape)  # type: ignore[no-untyped-call]


def _group_norm(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    tape.check_rows(input)
    normalized = F.group_norm(input, num_groups, None, None, eps)
    shape = [1, input.shape[1]] + [1] * (input.ndim - 2)
    return _Affine.apply(tape, normalized, weight, bias, shape)  # type: ignore[no-untyped-call]


def _instance_norm(
    tape: "OnePass",
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,  # noqa: ARG001 - there are both or none
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,  # noqa: ARG001 - of running statistics
    eps: float = 1e-5,
) -> Any:
    if running_mean is not None or not use_input_stats:
        raise UnsupportedError("instance-norm has running statistics")
    return _group_norm(tape, input, input.shape[1], weight, bias, eps)


LAYERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _transposed_convolution),
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
}
