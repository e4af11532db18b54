"""group_norm(relu(conv(x))), a block of a small convolutional network, in torch's operations or in kernels for K runs.

Between blocks, images have the shape [N, channels, height, width]. In memory, the images that kernels compute are in
channels-last order, [K, N, height, width, channels]. The kernels of the next block need this order, and torch's
operations also accept it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask._physical import RunsFunction, apply_to_runs, has_kernels
from sandmask.functional.split import Halves, split_products

NARROWEST = 16  # smallest number of output channels for the kernels
LARGEST = 2**31  # upper limit of the numbers in the images of one run, given by the addresses in the kernels

# Computes moments instead of the gradients of a block's parameters. Its arguments are the gradient of the convolution's
# result and the block's input, both [K, N, height, width, channels], and the sums of `normalize_backward`.
Fold = Callable[[Tensor | Halves, Tensor | Halves, Tensor], None]


def kernels_suit() -> bool:
    """Whether convolutions should use the kernels: with TF32, half precision or products of halves.

    In full precision, they would not use a GPU's tensor cores, and would take long to compile.
    """
    return torch.get_float32_matmul_precision() != "highest" or split_products()


def conv_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    stride: int = 1,
    groups: int = 8,
    pooled: bool = False,
) -> Tensor:
    """group_norm(relu(conv(x))) of x [N, in, height, width], with weight [out, in, 3, 3] and a padding of 1.

    With `pooled`, the result is the mean over pixels, [N, out]. Without kernels, the block consists of torch's
    operations, which tapes and compilers can process.
    """
    by_kernels = kernels_suit() and has_kernels(x) and _fits(x, weight, stride, groups)
    if torch.compiler.is_compiling() or not by_kernels:
        y = plain_conv_block(x, weight, bias, gamma, beta, stride, groups)
        return y.mean((2, 3)) if pooled else y
    params = (weight, bias, gamma, beta)
    if has_torch_function((x, *params)):
        how = {"stride": stride, "groups": groups, "pooled": pooled}
        result: Tensor = handle_torch_function(conv_block, (x, *params), x, *params, **how)
        return result
    return fused_conv_block(x, *params, stride, groups, pooled=pooled)


def plain_conv_block(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, stride: int, groups: int
) -> Tensor:
    """`conv_block` in torch's operations, which work under any transform of `torch.func`."""
    return F.group_norm(torch.relu(F.conv2d(x, weight, bias, stride, 1)), groups, gamma, beta)


def fused_conv_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    stride: int,
    groups: int,
    fold: Fold | None = None,
    pooled: bool = False,
) -> Tensor:
    """`conv_block` in kernels: inside `vmap` over K runs, or outside of `vmap` for a stack of one run."""
    return apply_to_runs(_ConvBlock, (x, weight, bias, gamma, beta), (stride, groups, fold, pooled))


def _fits(x: Tensor, weight: Tensor, stride: int, groups: int) -> bool:
    """Whether the kernels support these shapes."""
    n_samples, n_out, sides = x.shape[0], weight.shape[0], x.shape[-2:]
    powers = all(n & (n - 1) == 0 for n in (n_out, groups)) and n_out >= max(NARROWEST, groups)
    small = 0 < n_samples * sides.numel() * max(n_out, x.shape[1]) < LARGEST
    return x.ndim == 4 and weight.shape[2:] == (3, 3) and stride in (1, 2) and powers and small


class _ConvBlock(RunsFunction):
    """`conv_block` of K runs in kernels. Under `vmap`, it takes the tensors of all runs at once.

    After the result, it returns tensors that are outputs only because they are saved for the backward pass.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        gamma: Tensor,
        beta: Tensor,
        stride: int,
        groups: int,
        fold: Fold | None,  # noqa: ARG004 - for the backward pass
        pooled: bool,
    ) -> tuple[Tensor, ...]:
        from sandmask.functional.kernels import conv as conv_kernels
        from sandmask.functional.kernels import norm

        taps, inputs = factor(conv_kernels.by_tap(weight)), factor(channels_last(x))
        h = conv_kernels.convolve(inputs, taps, rows(bias), stride)
        y, mean, scale = norm.normalize(h, rows(gamma), rows(beta), groups, pooled=pooled)
        factors = (*inputs, *taps) if isinstance(inputs, Halves) and isinstance(taps, Halves) else (taps,)
        return y if pooled else y.permute(0, 1, 4, 2, 3), h, mean, scale, *factors

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.stride, ctx.groups, ctx.fold, ctx.pooled = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_h: Tensor | None, *_: None) -> Any:
        """`of_h` is the gradient of the normalized image. It comes from a gradient of gradients."""
        if grad is None and of_h is None:
            return (None,) * 9
        saved = ctx.saved_tensors
        h = saved[5]
        if grad is None:
            grad = torch.zeros_like(h).permute(0, 1, 4, 2, 3)
        elif ctx.pooled:
            grad = _of_pixels(grad, h.shape[2:4])
        wants_x, how = ctx.needs_input_grad[0], (ctx.stride, ctx.groups)
        if torch.is_grad_enabled():
            from sandmask.functional.conv_second import differentiable_gradients

            if ctx.fold is not None or of_h is not None:
                raise RuntimeError("There are no kernels for third derivatives, or derivatives of folded gradients.")
            return *differentiable_gradients(saved, grad, *how, wants_x), *[None] * 4
        return *block_gradients(saved, grad, of_h, *how, wants_x, ctx.fold)[0], *[None] * 4


def block_gradients(
    saved: Sequence[Tensor],
    grad: Tensor,
    of_h: Tensor | None,
    stride: int,
    groups: int,
    wants_x: bool,
    fold: Fold | None = None,
) -> tuple[list[Tensor | None], Tensor | Halves]:
    """Gradients of the input, of the parameters (unless they are folded), and of the convolution's result."""
    from sandmask.functional.kernels import conv as conv_kernels
    from sandmask.functional.kernels import conv_weights, norm

    x, weight, bias, gamma, beta, h, mean, scale, *factors = saved
    wanted = grad.permute(0, 1, 3, 4, 2)
    found, sums = norm.normalize_backward(wanted, h, mean, scale, rows(gamma), groups, of_h)
    before = factor(found)
    inputs, taps = factors_of(x, factors)
    of_x = None
    if wants_x:
        of_x = conv_kernels.input_gradient(before, taps, stride, x.shape[3:]).permute(0, 1, 4, 2, 3)
    if fold is not None:
        fold(before, inputs, sums)
        return [of_x, None, None, None, None], before
    of_weight = conv_weights.weight_gradient(before, inputs, weight, stride)
    of_rest = (part.to(own.dtype) for part, own in zip(sums.sum(1).unbind(1), (bias, gamma, beta), strict=True))
    return [of_x, of_weight, *of_rest], before


def factors_of(x: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor | Halves, Tensor | Halves]:
    """The input and the weights by tap of a block, in the form for the kernels, from the saved tensors."""
    return (channels_last(x), factors[0]) if len(factors) == 1 else (Halves(*factors[:2]), Halves(*factors[2:]))


def _of_pixels(grad: Tensor, sides: torch.Size) -> Tensor:
    """The gradient of the pixels [..., height, width] of an image, all equal, from the gradient of their mean."""
    return (grad / sides.numel())[..., None, None].expand(*grad.shape, *sides)


def channels_last(x: Tensor) -> Tensor:
    """x [K, N, channels, height, width] as [K, N, height, width, channels], also in memory.

    Images that all runs share are not copied: they keep a stride of 0 between runs.
    """
    moved = x.permute(0, 1, 3, 4, 2)
    return moved[:1].contiguous().expand(moved.shape) if x.stride(0) == 0 else moved.contiguous()


def factor(x: Tensor) -> Tensor | Halves:
    """A factor of the kernels' products. With split products, float32 numbers become halves."""
    if x.dtype != torch.float32 or not split_products():
        return x
    from sandmask.functional.kernels.split import split

    return split(x)


def rows(values: Tensor) -> Tensor:
    """Values [K, n] with contiguous rows, at any distance from each other."""
    return values if values.stride(1) == 1 else values.contiguous()
