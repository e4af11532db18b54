"""Convolutions with a normalization and then a ReLU, in torch's operations or in kernels for K runs.

A block is relu(group_norm(conv(x))) with a square filter of odd size, a stride of 1 and a padding that keeps the size
of the image. The mean of a block over the examples of each environment can be computed together with the block. The
convolution of this mean equals the mean of the convolutions, but costs only as much as one image. As in `conv`, the
images that kernels compute are in channels-last order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sandmask._physical import RunsFunction, apply_to_runs, has_kernels
from sandmask.functional.conv import LARGEST, NARROWEST, channels_last, factor, kernels_suit, rows
from sandmask.functional.split import Halves

LARGEST_IMAGE = 4096  # pixels; one program normalizes a whole image, which takes long for a large image


def has_context_kernels(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether there are kernels for images x [N, in, height, width] and a block's weights [out, in, side, side]."""
    if torch.compiler.is_compiling() or not (kernels_suit() and has_kernels(x)):
        return False
    n_out, side = weight.shape[0], weight.shape[-1]
    powers = all(n & (n - 1) == 0 for n in (n_out, groups)) and n_out >= max(NARROWEST, groups)
    square = side % 2 == 1 and weight.shape[-2] == side and x.shape[-2:].numel() <= LARGEST_IMAGE
    return square and powers and 0 < x.shape[0] * x.shape[-2:].numel() * max(n_out, x.shape[1]) < LARGEST


def normed_block(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, groups: int, share: Tensor | None = None
) -> Tensor:
    """relu(group_norm(conv(x))) of x [N, in, height, width] by kernels.

    :param share: weight of each example in the mean of its environment, [E, N / E]. If given, the result is the means,
        [E, ...].
    """
    return apply_to_runs(_NormedBlock, (x, weight, bias, gamma, beta, share), (groups,))


def plain_normed_block(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, groups: int, share: Tensor | None = None
) -> Tensor:
    """`normed_block` in torch's operations, which work under any transform of `torch.func`."""
    h = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    y = torch.relu(F.group_norm(h, groups, gamma, beta))
    if share is None:
        return y
    return (share[..., None, None, None] * y.view(*share.shape, *y.shape[1:])).sum(1).to(y.dtype)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """conv(x) by kernels. Output channels are padded to a number that the kernels support."""
    n_out = weight.shape[0]
    missing = max(NARROWEST, 1 << (n_out - 1).bit_length()) - n_out
    padded = F.pad(weight, (0, 0) * 3 + (0, missing)), F.pad(bias, (0, missing))
    return apply_to_runs(_Convolution, (x, *padded), ())[:, :n_out]


class _NormedBlock(RunsFunction):
    """`normed_block` of K runs in kernels. Under `vmap`, it takes the tensors of all runs at once.

    After the result, it returns tensors that are outputs only because they are saved for the backward pass.
    """

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, share: Tensor | None, groups: int
    ) -> tuple[Tensor, ...]:
        from sandmask.functional.kernels import conv as conv_kernels
        from sandmask.functional.kernels import norm, norm_relu

        taps, inputs = factor(conv_kernels.by_tap(weight)), factor(channels_last(x))
        h = conv_kernels.convolve(inputs, taps, rows(bias), 1, relu=False)
        own = (rows(gamma), rows(beta))
        y, mean, scale = norm.normalize(h, *own, groups, relu=True, writes=share is None)
        if share is not None:
            y = norm_relu.mean_of_normalized(h, mean, scale, *own, share.contiguous(), groups)
        return y.permute(0, 1, 4, 2, 3), h, mean, scale, *_kept(inputs, taps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.groups = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
        if grad is None:
            return (None,) * 7
        from sandmask.functional.kernels import norm_relu

        x, weight, bias, gamma, beta, share, h, mean, scale, *factors = ctx.saved_tensors
        own = (mean, scale, rows(gamma), rows(beta), ctx.groups)
        shares = None if share is None else share.contiguous()
        found, sums = norm_relu.normalize_relu_backward(grad.permute(0, 1, 3, 4, 2), h, *own, shares)
        of_x, of_weight = _of_convolution(found, x, weight, factors, wanted=ctx.needs_input_grad[0])
        of_rest = (part.to(one.dtype) for part, one in zip(sums.sum(1).unbind(1), (bias, gamma, beta), strict=True))
        return of_x, of_weight, *of_rest, None, None


class _Convolution(RunsFunction):
    """`convolution` of K runs in kernels; see `_NormedBlock`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        from sandmask.functional.kernels import conv as conv_kernels

        taps, inputs = factor(conv_kernels.by_tap(weight)), factor(channels_last(x))
        h = conv_kernels.convolve(inputs, taps, rows(bias), 1, relu=False)
        return h.permute(0, 1, 4, 2, 3), *_kept(inputs, taps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
        if grad is None:
            return None, None, None
        x, weight, bias, *factors = ctx.saved_tensors
        found = grad.permute(0, 1, 3, 4, 2).contiguous()
        of_x, of_weight = _of_convolution(found, x, weight, factors, wanted=ctx.needs_input_grad[0])
        return of_x, of_weight, found.sum((1, 2, 3), dtype=torch.float32).to(bias.dtype)


def _kept(inputs: Tensor | Halves, taps: Tensor | Halves) -> tuple[Tensor, ...]:
    """The factors of a product that the backward pass uses again."""
    return (*inputs, *taps) if isinstance(inputs, Halves) and isinstance(taps, Halves) else (taps,)  # type: ignore[return-value]


def _of_convolution(
    found: Tensor, x: Tensor, weight: Tensor, factors: list[Tensor], *, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients of a convolution's input, if needed, and of its weights, from the gradient of the result."""
    from sandmask.functional.kernels import conv as conv_kernels
    from sandmask.functional.kernels import conv_weights

    before = factor(found)
    inputs, taps = (channels_last(x), *factors) if len(factors) == 1 else (Halves(*factors[:2]), Halves(*factors[2:]))
    of_x = conv_kernels.input_gradient(before, taps, 1, x.shape[3:]).permute(0, 1, 4, 2, 3) if wanted else None
    return of_x, conv_weights.weight_gradient(before, inputs, weight, 1)
