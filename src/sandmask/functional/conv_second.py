"""Second derivatives of a block, group_norm(relu(conv(x))), by kernels for K runs.

The gradients of a block are a separate function, whose gradients are again convolutions and sums over pixels. One of
its arguments is the normalized image h of the block. The gradients of h are passed to the backward pass of the block,
which adds them to its own gradients before the convolution, so that no product is computed twice.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sandmask.functional.conv import block_gradients, channels_last, factor, factors_of, rows
from sandmask.functional.split import Halves


def differentiable_gradients(
    saved: Sequence[Tensor], grad: Tensor, stride: int, groups: int, wants_x: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of a block's input, if needed, and of its parameters, as functions that can be differentiated.

    :param saved: tensors that the forward pass of the block saved.
    :param grad: gradient of the block's result, [K, N, out, height, width].
    :param stride: stride of the convolution.
    :param groups: groups of the normalization.
    :param wants_x: whether the gradient of the input is needed.
    """
    found: tuple[Tensor | None, ...] = _Gradients.apply(grad, stride, groups, wants_x, *saved)  # type: ignore[no-untyped-call]
    return found


class _Gradients(Function):
    """The gradients of a block, as a function of `grad`, the input, the weights, gamma and h."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, stride: int, groups: int, wants_x: bool, *saved: Tensor
    ) -> tuple[Tensor | None, ...]:
        found, before = block_gradients(saved, grad, None, stride, groups, wants_x)
        ctx.stride, ctx.groups, ctx.wants_x, ctx.n_saved = stride, groups, wants_x, len(saved)
        ctx.save_for_backward(grad, *saved, *(before if isinstance(before, Halves) else (before,)))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_x: Tensor | None, of_weight: Tensor, of_bias: Tensor, of_gamma: Tensor, of_beta: Tensor
    ) -> Any:
        """Differentiate the gradients. The arguments are gradients of gradients: `of_x` belongs to the gradient of x.

        With the gradient p of the convolution's result, the gradients are conv^T(p, weight) and x * p. The gradient of
        p is therefore conv(of_x, weight) + conv(x, of_weight) + of_bias.
        """
        from sandmask.functional.kernels import conv as conv_kernels
        from sandmask.functional.kernels import conv_pair, conv_weights, norm_second

        grad, x, weight, _, gamma, _, h, mean, scale, *rest = ctx.saved_tensors
        factors, kept = rest[: ctx.n_saved - 8], rest[ctx.n_saved - 8 :]
        before = Halves(*kept) if len(kept) == 2 else kept[0]
        inputs, taps = factors_of(x, factors)
        own = factor(conv_kernels.by_tap(of_weight))
        pairs, from_x, to_weight, to_x = [(inputs, own)], None, None, None
        if of_x is not None:
            from_x = factor(channels_last(of_x))
            pairs.append((from_x, taps))
            to_weight = conv_weights.weight_gradient(before, from_x, weight, ctx.stride)
        of_before = conv_pair.convolve_sum(pairs, rows(of_bias), ctx.stride)
        if ctx.wants_x:
            to_x = conv_kernels.input_gradient(before, own, ctx.stride, x.shape[3:]).permute(0, 1, 4, 2, 3)
        image = norm_second.Image(h, mean, scale, ctx.groups)
        to_grad, to_h, sums = norm_second.normalize_second(
            grad.permute(0, 1, 3, 4, 2), of_before, image, *map(rows, (gamma, of_gamma, of_beta))
        )
        to_gamma = sums.sum(1).to(gamma.dtype)
        parameters = (to_x, to_weight, None, to_gamma, None)
        return to_grad.permute(0, 1, 4, 2, 3), None, None, None, *parameters, to_h, *[None] * (2 + len(factors))
