"""The classifier: a linear layer in float32 on features of any precision, alone or with the linear layer before it.

The last layer of a network stays in full precision. Torch's operations first copy the features to float32, which is
most of the work for a layer of two outputs. The kernels read features of any precision.

Two consecutive linear layers, (x W^T + b) V^T + c, equal x (V W)^T + (V b + c) up to rounding. With few classes, the
second form has no tensors as wide as the features in either pass, and the layer before the classifier costs almost
nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sandmask._physical import RunsFunction, has_kernels, in_vmap
from sandmask.functional.dense import PART, Rows, saturated, weighted

MOST_CLASSES = 64  # largest number of classes that the kernels support
NARROW = 4  # two layers are computed as one if there are at least this many times as many features as classes

# Computes moments instead of the gradients of the parameters. Its arguments are the weight's sums [K, E, classes, in]
# and the gradient of the logits.
Fold = Callable[[Tensor, Tensor], None]


def head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b in the precision of W. `x` [N, in] may have a lower precision, and zeros as padding (see `dense`)."""
    if not (in_vmap() and x.ndim == 2 and has_head_kernels(x, weight)):
        return F.linear(saturated(x[..., : weight.shape[-1]]).to(weight.dtype), weight, bias)
    if has_torch_function((x, weight, bias)):
        result: Tensor = handle_torch_function(head, (x, weight, bias), x, weight, bias)
        return result
    return fused_head(x, weight, bias)


def has_head_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support features x and weights [..., classes, in]."""
    return has_kernels(x) and weight.dtype == torch.float32 and weight.shape[-2] <= MOST_CLASSES


def fused_head(x: Tensor, weight: Tensor, bias: Tensor, rows: Rows | None = None, fold: Fold | None = None) -> Tensor:
    """`head` in kernels, inside `vmap` over K runs."""
    y: Tensor = _Head.apply(x, weight, bias, rows, fold)  # type: ignore[no-untyped-call]
    return y


class _Head(RunsFunction):
    """`head` of K runs in kernels. Under `vmap`, it takes the tensors of all runs at once."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Rows | None,  # noqa: ARG004 - for the backward pass
        fold: Fold | None,  # noqa: ARG004 - as well
    ) -> Tensor:
        from sandmask.functional.kernels import head as head_kernels

        return head_kernels.logits(x.contiguous(), weight.contiguous(), bias.contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        x, weight, _, ctx.rows, ctx.fold = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from sandmask.functional.kernels import head as head_kernels

        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.fold is None:
            return *_differentiable_gradients(x, weight, grad), None, None
        rows, grad, x, weight = ctx.rows, grad.contiguous(), x.contiguous(), weight.contiguous()
        if rows is None:
            of_x, sums = head_kernels.gradients(grad, x, weight, PART)
            return of_x, sums.sum(1), grad.sum(1), None, None
        in_sums = weighted(grad, rows.roots)
        of_x, sums = head_kernels.gradients(grad, x, weight, x.shape[1] // rows.n_envs, in_sums)
        ctx.fold(sums, in_sums)
        return of_x, None, None, None, None


def _differentiable_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients in torch's operations, so that they can be differentiated. This is a small part of a network."""
    n_in = weight.shape[-1]
    of_x = F.pad(torch.bmm(grad, weight), (0, x.shape[-1] - n_in)).to(x.dtype)
    return of_x, torch.bmm(grad.mT, saturated(x[..., :n_in]).to(weight.dtype)), grad.sum(1)


def linear_pair(x: Tensor, weight: Tensor, bias: Tensor, classifier: Tensor, classifier_bias: Tensor) -> Tensor:
    """(x W^T + b) V^T + c of x [N, in], W [features, in], b, V [classes, features] and c, in the precision of V.

    As for `head`, x may be padded with zeros, and x, W and b may have a lower precision.
    """
    if has_torch_function((x, weight, bias, classifier, classifier_bias)):
        result: Tensor = handle_torch_function(
            linear_pair, (x, weight, bias, classifier, classifier_bias), x, weight, bias, classifier, classifier_bias
        )
        return result
    weight, bias = weight.to(classifier.dtype), bias.to(classifier.dtype)
    return head(x, classifier @ weight, F.linear(bias, classifier, classifier_bias))
