"""Classifiers, alone or with the linear layer before them, whose gradients are folded into moments."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from sandmask._physical import has_kernels, leading
from sandmask._scratch import scratch_product
from sandmask.functional.dense import by_environment
from sandmask.functional.head import fused_head, has_head_kernels

if TYPE_CHECKING:
    from sandmask.functional.tape.moment_tape import MomentTape, Place


def taped_head(tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`head`, where there are kernels for it."""
    tape.check_rows(x, 2)
    of_weight, of_bias = tape.claim(weight, bias)

    def fold(sums: Tensor, grad: Tensor) -> None:
        by_env = grad.view(len(grad), tape.n_envs, -1, grad.shape[2])
        tape.fold(of_weight, lambda runs: sums[runs])
        tape.fold(of_bias, lambda runs: by_env[runs].sum(2))

    return fused_head(x, weight, bias, tape.n_envs, fold)


def taped_linear_pair(tape: "MomentTape", x: Tensor, *params: Tensor) -> Tensor:
    """`linear_pair`."""
    tape.check_rows(x, 2)
    places = tape.claim(*params)

    def fold(grad: Tensor, products: Tensor, *saved: Tensor) -> None:
        _fold(tape, places, grad, products, *saved)

    y: Tensor = _TapedLinearPair.apply(x, *params, tape.n_envs, fold)  # type: ignore[no-untyped-call]
    return y


def _fold(
    tape: "MomentTape",
    places: "tuple[Place, ...]",
    grad: Tensor,
    products: Tensor,
    weight: Tensor,
    bias: Tensor,
    head: Tensor,
) -> None:
    """Fold the gradients of W, b, V and c: V^T p_e, V^T s_e, p_e W^T + s_e b^T and s_e.

    Here s_e is the sum of the logits' gradients g_e [B, classes] over rows, and p_e = g_e^T x_e.
    """
    of_weight, of_bias, of_head, of_head_bias = places
    sums = by_environment(grad, tape.n_envs).sum(2)
    tape.fold(of_head_bias, lambda runs: sums[runs])
    tape.fold(of_bias, lambda runs: sums[runs] @ head[runs])
    through = torch.bmm(products.flatten(1, 2), weight.mT).view(*sums.shape, -1)
    through += sums.unsqueeze(-1) * bias[:, None, None]
    tape.fold(of_head, lambda runs: through[runs])
    if has_kernels(grad):
        from sandmask.functional.kernels import moments as moment_kernels

        moment_kernels.outer_moments(head, products, tape.unscale, tape.target(of_weight))
        return
    tape.fold(of_weight, lambda runs: scratch_product(head[runs].unsqueeze(1).mT, products[runs]))


class _TapedLinearPair(Function):
    """Of K runs: inside of `vmap` it is called again with the leading dimension."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        head: Tensor,
        head_bias: Tensor,
        n_envs: int,  # noqa: ARG004 - for the backward pass
        fold: Any,  # noqa: ARG004 - as well
    ) -> Tensor:
        both = torch.bmm(head, weight.to(head.dtype))
        constant = torch.baddbmm(head_bias.unsqueeze(1), bias.to(head.dtype).unsqueeze(1), head.mT)
        if has_head_kernels(x, both):
            from sandmask.functional.kernels import head as head_kernels

            return head_kernels.logits(x.contiguous(), both, constant.squeeze(1))
        return torch.baddbmm(constant, x[..., : both.shape[2]].to(both.dtype), both.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        x, weight, bias, head, _, ctx.n_envs, ctx.fold = inputs
        ctx.save_for_backward(x, weight, bias, head)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, head = ctx.saved_tensors
        weight, bias = weight.to(head.dtype), bias.to(head.dtype)
        of_x, products = _gradients(grad, x, torch.bmm(head, weight), ctx.n_envs, wanted=ctx.needs_input_grad[0])
        ctx.fold(grad, products, weight, bias, head)
        return of_x, *[None] * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        y: Tensor = _TapedLinearPair.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return y, 0


def _gradients(grad: Tensor, x: Tensor, both: Tensor, n_envs: int, *, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """Gradient of x, if it is needed, and the products g_e^T x_e [K, E, classes, in]."""
    if has_head_kernels(x, both):
        from sandmask.functional.kernels import head as head_kernels

        return head_kernels.gradients(grad.contiguous(), x.contiguous(), both, x.shape[1] // n_envs)
    own = x[..., : both.shape[2]].to(both.dtype)
    of_x = torch.bmm(grad, both) if wanted else None
    if of_x is not None and of_x.shape != x.shape:
        of_x = torch.nn.functional.pad(of_x, (0, x.shape[2] - of_x.shape[2]))
    return None if of_x is None else of_x.to(x.dtype), by_environment(grad, n_envs).mT @ by_environment(own, n_envs)
