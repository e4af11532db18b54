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
    """`torch.nn.functional.linear`."""
    return _taped(tape, input, weight, bias, None, None, site=0, relu=False)[..., : weight.shape[0]]


def taped_affine(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`affine`."""
    return _taped(tape, x, weight, bias, None, None, site=0, relu=False)


def _taped(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, *noise: Any, site: int, relu: bool) -> Tensor:
    tape.check_rows(x, 2)
    places = tape.claim(weight, bias)
    assert bias is not None  # or it could not be claimed
    sizes = (weight.shape[0], weight.shape[1])

    def fold(grad: Tensor, sums: Tensor, x: Tensor) -> None:
        _fold(tape, sizes, places, grad, sums, x)

    y: Tensor = _TapedLayer.apply(x, weight, bias, *noise, site, relu, tape.n_envs, fold, weight)  # type: ignore[no-untyped-call]
    return y


def _fold(tape: Tape, sizes: tuple[int, int], places: tuple[Place, ...], grad: Tensor, sums: Tensor, x: Tensor) -> None:
    """Fold the gradients of a layer's weight, grad_e^T x_e, and of its bias, the sums of grad_e [K, E, out]."""
    (n_out, n_in), (weight, bias) = sizes, places
    tape.fold(bias, lambda runs: sums[runs, :, :n_out])
    if has_kernels(grad) and min(n_out, n_in) >= SMALLEST:
        from sandmask.functional import kernels

        kernels.weight_moments(grad, x, tape.unscale, tape.n_envs, sizes, tape.target(weight))
        return
    by_env, x_by_env = _by_environment(grad, tape.n_envs)[..., :n_out], _by_environment(x, tape.n_envs)[..., :n_in]
    tape.fold(weight, lambda runs: by_env[runs].mT @ x_by_env[runs])


def _by_environment(rows: Tensor, n_envs: int) -> Tensor:
    """[K, E * B, n] as [K, E, B, n]."""
    return rows.reshape(len(rows), n_envs, -1, rows.shape[2])


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
        n_envs: int,  # noqa: ARG004 - as the next
        fold: Any,  # noqa: ARG004 - for the backward pass
        source: Tensor,  # noqa: ARG004 - what `weight` is made of: the backward pass goes where this one wants it
    ) -> Tensor:
        if relu:
            return dense_of_runs(x, weight, bias, rows, rate, site)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, _, rate, _, ctx.relu, ctx.n_envs, ctx.fold, _ = inputs
        ctx.save_for_backward(x, weight, output if ctx.relu else None, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, out, rate = ctx.saved_tensors
        if ctx.relu:
            before, sums = dense_backward(grad, out, rate, ctx.n_envs)
        else:
            before, sums = grad, _by_environment(grad, ctx.n_envs).sum(2)
        ctx.fold(before, sums, x)
        of_x = torch.bmm(before, weight) if ctx.needs_input_grad[0] else None
        return of_x, *[None] * 9

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        x, weight, bias, *how = leading(info.batch_size, in_dims, args)
        worth_it = has_kernels(x) and weight.shape[1] >= SMALLEST
        wide = aligned_runs(x, weight, bias) if worth_it else (x, weight, bias)
        y: Tensor = _TapedLayer.apply(*wide, *how[:-1], weight)  # type: ignore[no-untyped-call]
        return y, 0
