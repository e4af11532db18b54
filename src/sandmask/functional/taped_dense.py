"""Dense layers whose gradients are folded into moments."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sandmask._physical import has_kernels, leading
from sandmask.functional.dense import aligned_runs, dense_backward, dense_of_runs
from sandmask.functional.dropout import Dropout
from sandmask.functional.taped import Place, Tape

SMALLEST = 16  # sides of a weight matrix from which on the kernel pays


def taped_dense(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0
) -> Tensor:
    """`dense`."""
    rows, rate = (None, None) if drop is None else (drop.rows, drop.rate)
    return _taped(tape, x, weight, bias, rows, rate, site=site, relu=True)


def taped_linear(
    tape: Tape,
    input: Tensor,  # noqa: A002 - as `torch.nn.functional.linear` has it
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`affine` and `torch.nn.functional.linear`."""
    return _taped(tape, input, weight, bias, None, None, site=0, relu=False)[..., : weight.shape[0]]


def _taped(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, *noise: Any, site: int, relu: bool) -> Tensor:
    tape.check_rows(x, 2)
    places = tape.claim(weight, bias)
    assert bias is not None  # or it could not be claimed
    sizes = (weight.shape[0], weight.shape[1])

    def fold(grad: Tensor, x: Tensor) -> None:
        _fold(tape, sizes, places, grad, x)

    y: Tensor = _TapedLayer.apply(x, weight, bias, *noise, site, relu, fold, weight)  # type: ignore[no-untyped-call]
    return y


def _fold(tape: Tape, sizes: tuple[int, int], places: tuple[Place, ...], grad: Tensor, x: Tensor) -> None:
    """Fold the gradients of a layer's weight, grad_e^T x_e, and of its bias, the sums of grad_e: [K, E * B, ...]."""
    (n_out, n_in), (weight, bias) = sizes, places
    by_env = grad.reshape(len(grad), tape.n_envs, -1, grad.shape[2])[..., :n_out]
    tape.fold(bias, lambda runs: by_env[runs].sum(2))
    if has_kernels(grad) and min(n_out, n_in) >= SMALLEST:
        from sandmask.functional import kernels

        kernels.weight_moments(grad, x, tape.unscale, tape.n_envs, sizes, tape.buffers[..., slice(*weight)])
        return
    x_by_env = x.reshape(len(x), tape.n_envs, -1, x.shape[2])[..., :n_in]
    tape.fold(weight, lambda runs: by_env[runs].mT @ x_by_env[runs])


class _TapedLayer(Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor | None,
        rate: Tensor | None,
        site: int,
        relu: bool,
        fold: Any,  # noqa: ARG004 - for the backward pass
        source: Tensor,  # noqa: ARG004 - what `weight` is made of: the backward pass goes where this one wants it
    ) -> Tensor:
        if relu:
            return dense_of_runs(x, weight, bias, rows, rate, site)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, _, rate, _, ctx.relu, ctx.fold, _ = inputs
        ctx.save_for_backward(x, weight, output if ctx.relu else None, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, out, rate = ctx.saved_tensors
        before = dense_backward(grad, out, rate) if ctx.relu else grad
        ctx.fold(before, x)
        of_x = torch.bmm(before, weight) if ctx.needs_input_grad[0] else None
        return of_x, *[None] * 8

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        x, weight, bias, *how = leading(info.batch_size, in_dims, args)
        worth_it = has_kernels(x) and weight.shape[1] >= SMALLEST
        wide = aligned_runs(x, weight, bias) if worth_it else (x, weight, bias)
        y: Tensor = _TapedLayer.apply(*wide, *how[:-1], weight)  # type: ignore[no-untyped-call]
        return y, 0
