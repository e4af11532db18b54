"""Dense layers whose gradients are folded into moments."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from sandmask._physical import has_kernels, leading
from sandmask._scratch import scratch_product
from sandmask.functional import split_dense
from sandmask.functional.dense import aligned, by_environment, layer_backward, layer_of_runs
from sandmask.functional.dropout import Dropout
from sandmask.functional.split import Halves

if TYPE_CHECKING:
    from sandmask.functional.tape.moment_tape import MomentTape, Place

SMALLEST = 16  # sides of a weight matrix from which on kernels pay; in half precision they also round less
AT_ONCE = 2**28  # numbers of all environments' gradients that are kept at a time


def taped_dense(
    tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor, drop: Dropout | None = None, site: int = 0
) -> Tensor:
    """`dense`."""
    keys, rate = (None, None) if drop is None else (drop.keys, drop.rate)
    return _taped(tape, x, weight, bias, keys, rate, site=site, relu=True)


def taped_linear(
    tape: "MomentTape",
    input: Tensor,  # noqa: A002 - as `torch.nn.functional.linear` has it
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.linear`."""
    return _taped(tape, input, weight, bias, None, None, site=0, relu=False)[..., : weight.shape[0]]


def taped_affine(tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`affine`."""
    return _taped(tape, x, weight, bias, None, None, site=0, relu=False)


def _taped(
    tape: "MomentTape", x: Tensor, weight: Tensor, bias: Tensor | None, *noise: Any, site: int, relu: bool
) -> Tensor:
    tape.check_rows(x, 2)
    places = tape.claim(weight, bias)
    assert bias is not None  # or it could not be claimed
    sizes = (weight.shape[0], weight.shape[1])

    if split_dense.pays(x, weight):

        def fold_halves(grad: Halves, sums: Tensor, x: Halves) -> None:
            _fold_halves(tape, sizes, places, grad, sums, x)

        rows, rate = noise
        return split_dense.split_layer(x, weight, bias, rows, rate, site, relu, tape.n_envs, fold_halves)

    def fold(grad: Tensor, sums: Tensor, x: Tensor) -> None:
        _fold(tape, sizes, places, grad, sums, x)

    y: Tensor = _TapedLayer.apply(x, weight, bias, *noise, site, relu, tape.n_envs, fold)  # type: ignore[no-untyped-call]
    return y


def _fold(
    tape: "MomentTape", sizes: tuple[int, int], places: "tuple[Place, ...]", grad: Tensor, sums: Tensor, x: Tensor
) -> None:
    """Fold the gradients of a layer's weight, grad_e^T x_e, and of its bias, the sums of grad_e [K, E, out]."""
    (n_out, n_in), (weight, bias) = sizes, places
    tape.fold(bias, lambda runs: sums[runs, :, :n_out])
    if has_kernels(grad) and (grad.itemsize == 2 or min(n_out, n_in) >= SMALLEST):
        _fold_by_kernels(tape, sizes, weight, grad, x)
        return
    by_env, x_by_env = by_environment(grad, tape.n_envs)[..., :n_out], by_environment(x, tape.n_envs)[..., :n_in]
    tape.fold(weight, lambda runs: _products(by_env[runs], x_by_env[runs]))


def _fold_halves(
    tape: "MomentTape", sizes: tuple[int, int], places: "tuple[Place, ...]", grad: Halves, sums: Tensor, x: Halves
) -> None:
    """The same of halves."""
    from sandmask.functional.kernels import moments

    weight, bias = places
    tape.fold(bias, lambda runs: sums[runs, :, : sizes[0]])
    moments.weight_moments(grad, x, tape.unscale, tape.n_envs, sizes, tape.target(weight))


def _products(grad: Tensor, x: Tensor) -> Tensor:
    """grad_e^T x_e of [k, E, B, n]. Never in half precision: float16 could not hold the sums over rows."""
    exact = torch.promote_types(grad.dtype, torch.float32)
    return scratch_product(grad.to(exact).mT, x.to(exact))


def _fold_by_kernels(tape: "MomentTape", sizes: tuple[int, int], place: "Place", grad: Tensor, x: Tensor) -> None:
    """In half precision moments come out of the kernel that multiplies; otherwise torch multiplies faster."""
    from sandmask.functional.kernels import moments as moment_kernels

    n_envs, target = tape.n_envs, tape.target(place)
    if grad.itemsize == 2:
        moment_kernels.weight_moments(grad, x, tape.unscale, n_envs, sizes, target)
        return
    together = max(AT_ONCE // (n_envs * grad.shape[2] * x.shape[2]), 1)
    for begin in range(0, len(grad), together):
        runs = slice(begin, begin + together)
        products = by_environment(grad[runs], n_envs).mT @ by_environment(x[runs], n_envs)
        unscale = None if tape.unscale is None else tape.unscale[runs]
        moment_kernels.fold_runs(products[:, :, : sizes[0]], unscale, target[:, runs], sizes[1])


class _TapedLayer(Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        keys: Tensor | None,
        rate: Tensor | None,
        site: int,
        relu: bool,
        n_envs: int,  # noqa: ARG004 - as the next
        fold: Any,  # noqa: ARG004 - for the backward pass
    ) -> Tensor:
        return layer_of_runs(*aligned(x, weight, bias), keys, rate, site, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, _, rate, _, relu, ctx.n_envs, ctx.fold = inputs
        ctx.save_for_backward(x, weight, bias, output if relu else None, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, out, rate = ctx.saved_tensors
        wide_x, wide_weight, _ = aligned(x, weight, bias)
        before, sums = layer_backward(grad, out, rate, ctx.n_envs)
        ctx.fold(before, sums, wide_x)
        of_x = torch.bmm(before, wide_weight)[..., : x.shape[2]] if ctx.needs_input_grad[0] else None
        return of_x, *[None] * 8

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        y: Tensor = _TapedLayer.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return y, 0
