"""Layers whose gradients are folded into moments. They are used while a `MomentTape` is active, inside `vmap`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sandmask._physical import RunsFunction, has_kernels
from sandmask._scratch import scratch_product
from sandmask.functional.conv import fused_conv_block
from sandmask.functional.dense import Dropout, Rows, by_environment, layer_function, weighted
from sandmask.functional.head import fused_head, has_head_kernels
from sandmask.functional.split import Halves, split_products

if TYPE_CHECKING:
    from sandmask.functional.tape.moment_tape import MomentTape, Span

SMALLEST = 16  # smallest side of a weight matrix for which kernels are faster; in half precision, they also round less
AT_ONCE = 2**28  # limit of numbers in the gradients of all environments that are in memory at a time


def taped_dense(
    tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0
) -> Tensor:
    """`dense`."""
    return _taped(tape, x, weight, bias, drop, site=site, relu=True)


def taped_linear(
    tape: "MomentTape",
    input: Tensor,  # noqa: A002 - as `torch.nn.functional.linear` has it
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.linear`."""
    return _taped(tape, input, weight, bias, None, site=0, relu=False)[..., : weight.shape[0]]


def taped_affine(tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`affine`."""
    return _taped(tape, x, weight, bias, None, site=0, relu=False)


def _taped(
    tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor | None, drop: Dropout | None, *, site: int, relu: bool
) -> Tensor:
    tape.check_rows(x, 2)
    n_out, n_in = weight.shape
    of_weight, of_bias = tape.claim(weight, bias)

    def fold(grad: Tensor | Halves, sums: Tensor, x: Tensor | Halves) -> None:
        """Fold the gradients of the weight, grad_e^T x_e, and of the bias, the sums of grad_e [K, E, out]."""
        tape.fold(of_bias, lambda runs: sums[runs, :, :n_out])
        _fold_weight(tape, (n_out, n_in), of_weight, grad, x)

    keys, rate = (None, None) if drop is None else (drop.keys, drop.rate)
    outputs = layer_function(x, weight).apply(x, weight, bias, keys, rate, site, relu, tape.rows, fold)  # type: ignore[no-untyped-call]
    y: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    return y


def _fold_weight(
    tape: "MomentTape", sizes: tuple[int, int], span: "Span", grad: Tensor | Halves, x: Tensor | Halves
) -> None:
    """Fold the gradients of a weight. In half precision and `fp32x3`, one kernel also multiplies."""
    n_envs = tape.n_envs
    if isinstance(grad, Halves) or isinstance(x, Halves) or (has_kernels(grad) and _folded_by_kernel(grad)):
        from sandmask.functional.kernels import moments as moment_kernels

        moment_kernels.weight_moments(grad, x, tape.unscale, n_envs, sizes, tape.target(span), tape.rows.roots)
        return
    by_env, x_by_env = by_environment(grad, n_envs), by_environment(x, n_envs)
    if not has_kernels(grad) or min(sizes) < SMALLEST:
        by_env, x_by_env = by_env[..., : sizes[0]], x_by_env[..., : sizes[1]]
        tape.fold(span, lambda runs: _products(by_env[runs], x_by_env[runs]))
        return
    from sandmask.functional.kernels import moments as moment_kernels

    target = tape.target(span)
    together = max(AT_ONCE // (n_envs * grad.shape[2] * x.shape[2]), 1)
    for begin in range(0, len(grad), together):
        runs = slice(begin, begin + together)
        unscale = None if tape.unscale is None else tape.unscale[runs]
        products = (by_env[runs].mT @ x_by_env[runs])[:, :, : sizes[0]]
        moment_kernels.fold_runs(products, unscale, target[:, runs], sizes[1])


def _folded_by_kernel(grad: Tensor) -> bool:
    return grad.itemsize == 2 or (split_products() and grad.dtype == torch.float32)


def _products(grad: Tensor, x: Tensor) -> Tensor:
    """grad_e^T x_e of [k, E, B, n]. It is not in half precision, because sums over rows may not fit into float16."""
    exact = torch.promote_types(grad.dtype, torch.float32)
    return scratch_product(grad.to(exact).mT, x.to(exact))


def taped_head(tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`head`, if there are kernels for it."""
    tape.check_rows(x, 2)
    of_weight, of_bias = tape.claim(weight, bias)

    def fold(sums: Tensor, grad: Tensor) -> None:
        by_env = by_environment(grad, tape.n_envs)
        tape.fold(of_weight, lambda runs: sums[runs])
        tape.fold(of_bias, lambda runs: by_env[runs].sum(2))

    return fused_head(x, weight, bias, tape.rows, fold)


def taped_linear_pair(tape: "MomentTape", x: Tensor, *params: Tensor) -> Tensor:
    """`linear_pair`."""
    tape.check_rows(x, 2)
    of_weight, of_bias, of_head, of_head_bias = tape.claim(*params)

    def fold(grad: Tensor, products: Tensor, weight: Tensor, bias: Tensor, head: Tensor) -> None:
        """Fold the gradients of W, b, V and c: V^T p_e, V^T s_e, p_e W^T + s_e b^T and s_e.

        Here s_e is the sum of the logits' gradients g_e [B, classes] over rows, and p_e = g_e^T x_e.
        """
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

    y: Tensor = _TapedLinearPair.apply(x, *params, tape.rows, fold)  # type: ignore[no-untyped-call]
    return y


class _TapedLinearPair(RunsFunction):
    """A layer of K runs. Under `vmap`, it takes the tensors of all runs at once."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        head: Tensor,
        head_bias: Tensor,
        rows: Rows,  # noqa: ARG004 - for the backward pass
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
        x, weight, bias, head, _, ctx.rows, ctx.fold = inputs
        ctx.save_for_backward(x, weight, bias, head)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, head = ctx.saved_tensors
        weight, bias = weight.to(head.dtype), bias.to(head.dtype)
        in_sums, both = weighted(grad, ctx.rows.roots), torch.bmm(head, weight)
        of_x, products = _gradients(grad, in_sums, x, both, ctx.rows.n_envs, wanted=ctx.needs_input_grad[0])
        ctx.fold(in_sums, products, weight, bias, head)
        return of_x, *[None] * 6


def _gradients(
    grad: Tensor, in_sums: Tensor, x: Tensor, both: Tensor, n_envs: int, *, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradient of x, if needed, and the products h_e^T x_e [K, E, classes, in] with h = `in_sums`."""
    if has_head_kernels(x, both):
        from sandmask.functional.kernels import head as head_kernels

        return head_kernels.gradients(
            grad.contiguous(), x.contiguous(), both, x.shape[1] // n_envs, in_sums.contiguous()
        )
    own = x[..., : both.shape[2]].to(both.dtype)
    of_x = torch.bmm(grad, both) if wanted else None
    if of_x is not None and of_x.shape != x.shape:
        of_x = torch.nn.functional.pad(of_x, (0, x.shape[2] - of_x.shape[2]))
    return None if of_x is None else of_x.to(x.dtype), by_environment(in_sums, n_envs).mT @ by_environment(own, n_envs)


def taped_conv_block(
    tape: "MomentTape",
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    stride: int = 1,
    groups: int = 8,
    pooled: bool = False,
) -> Tensor:
    """`conv_block`, if there are kernels for it."""
    tape.check_rows(x, 4)
    span, *others = tape.claim(weight, bias, gamma, beta)
    tape.takes_roots = False

    def fold(before: Tensor | Halves, inputs: Tensor | Halves, sums: Tensor) -> None:
        from sandmask.functional.kernels import conv_weights, norm

        conv_weights.weight_moments(before, inputs, tape.unscale, tape.n_envs, stride, tape.target(span))
        of_bias, of_gamma, of_beta = (begin for begin, _ in others)
        norm.sample_moments(sums, tape.unscale, tape.n_envs, tape.target(*others), (of_bias, of_gamma, of_beta))

    return fused_conv_block(x, weight, bias, gamma, beta, stride, groups, fold, pooled)
