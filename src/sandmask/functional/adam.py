"""Adam as a pure function, equal to `torch.optim.Adam` up to rounding. Every setting may be a tensor with one value per
run.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sandmask._physical import has_kernels, on_all_runs, reachable


class AdamState(NamedTuple):
    """Running means of a flat gradient and of its square, and the number of steps taken."""

    mean: Tensor
    square: Tensor
    count: Tensor  # type: ignore[assignment]  # hides `tuple.count`, which nobody needs here


class Settings(NamedTuple):
    """The settings of one step; under `vmap`, of each run."""

    lr: Tensor | float
    weight_decay: Tensor | float
    betas: tuple[Tensor | float, Tensor | float]
    decoupled: Tensor | float
    eps: float

    @property
    def shrinkage(self) -> Tensor | float:
        """The factor by which decoupled weight decay shrinks parameters before the step, as in `torch.optim.AdamW`."""
        return 1.0 - self.lr * self.decoupled


def adam_init(params: Tensor) -> AdamState:
    """Return Adam's state before the first step.

    :param params: flat vector of parameters.
    """
    zero = torch.zeros_like(params)
    return AdamState(zero, zero.clone(), torch.zeros((), device=params.device))


def adam_reset(state: AdamState, when: Tensor) -> AdamState:
    """Return the state, or a new state where `when` is true.

    :param state: Adam's state.
    :param when: 0-dimensional boolean tensor.
    """
    # Not a product with 0, because the square of a large gradient may be infinite, and infinity times 0 is NaN.
    return AdamState(*(torch.where(when, 0.0, field) for field in state))


def adam_where(when: Tensor, one: AdamState, other: AdamState) -> AdamState:
    """Return the state `one` where `when` is true, and the state `other` elsewhere.

    :param when: 0-dimensional boolean tensor.
    :param one: Adam's state where `when` is true.
    :param other: Adam's state where `when` is false.
    """
    return AdamState(*(torch.where(when, a, b) for a, b in zip(one, other, strict=True)))


def adam_step(
    params: Tensor,
    gradient: Tensor,
    state: AdamState,
    lr: Tensor | float,
    weight_decay: Tensor | float = 0.0,
    betas: tuple[Tensor | float, Tensor | float] = (0.9, 0.999),
    decoupled: Tensor | float = 0.0,
    eps: float = 1e-8,
) -> tuple[Tensor, AdamState]:
    """Take one step of Adam.

    :param params: flat vector of parameters.
    :param gradient: gradient of the same shape.
    :param state: Adam's state.
    :param lr: learning rate.
    :param weight_decay: weight decay that is added to the gradient, after any mask, as in `torch.optim.Adam`.
    :param betas: decay rates of the running means.
    :param decoupled: decoupled weight decay, which shrinks the parameters themselves, as in `torch.optim.AdamW`.
    :param eps: added to the denominator.
    :return: new parameters and state.
    """
    settings = Settings(lr, weight_decay, betas, decoupled, eps)
    if params.ndim == 1 and params.shape == gradient.shape == state.mean.shape:
        if has_kernels(params):
            return _by_kernel(params, gradient, state, settings)
        if _fuses(params, gradient, *state[:2]):
            return _fused(params, gradient, state, settings)
    return plain_adam_step(params, gradient, state, *settings)


def plain_adam_step(
    params: Tensor,
    gradient: Tensor,
    state: AdamState,
    lr: Tensor | float,
    weight_decay: Tensor | float = 0.0,
    betas: tuple[Tensor | float, Tensor | float] = (0.9, 0.999),
    decoupled: Tensor | float = 0.0,
    eps: float = 1e-8,
) -> tuple[Tensor, AdamState]:
    """`adam_step` in torch's operations, which work under any transform of `torch.func`."""
    count = state.count + 1.0
    params = params * (1.0 - lr * decoupled)
    gradient = gradient + weight_decay * params
    mean = state.mean + (1.0 - betas[0]) * (gradient - state.mean)
    square = betas[1] * state.square + (1.0 - betas[1]) * gradient * gradient
    denominator = square.sqrt() / _correction(betas[1], count).sqrt() + eps
    return params - (lr / _correction(betas[0], count)) * mean / denominator, AdamState(mean, square, count)


def _by_kernel(params: Tensor, gradient: Tensor, state: AdamState, settings: Settings) -> tuple[Tensor, AdamState]:
    lr, weight_decay, betas, _, eps = settings
    count = state.count + 1.0
    from sandmask.functional.kernels import adam as adam_kernel

    first, second = _correction(betas[0], count), _correction(betas[1], count).sqrt()
    scalars = (weight_decay, *betas, lr / first, second, settings.shrinkage)
    each = [number + torch.zeros_like(count) for number in scalars]
    tensors = (params, gradient, state.mean, state.square, *each)
    params, mean, square = on_all_runs(partial(adam_kernel.adam, eps=eps), *tensors)
    return params, AdamState(mean, square, count)


def _fuses(*tensors: Tensor) -> bool:
    """Whether torch's fused Adam can be used. Here, it is used on CPUs; it works in place and has no derivative."""
    alike = {tensor.dtype for tensor in tensors} in ({torch.float32}, {torch.float64})
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return alike and on_cpu and reachable() and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _fused(params: Tensor, gradient: Tensor, state: AdamState, settings: Settings) -> tuple[Tensor, AdamState]:
    lr, weight_decay, betas, _, eps = settings
    count = state.count + 1.0
    each = [number + torch.zeros_like(count) for number in (lr, *betas, weight_decay, settings.shrinkage)]
    tensors = (params, state.mean, state.square, gradient, count, *each)
    params, mean, square = on_all_runs(partial(_fused_of_runs, eps=eps), *tensors)
    return params, AdamState(mean, square, count)


def _fused_of_runs(*tensors: Tensor, eps: float) -> tuple[Tensor, ...]:
    """One pass over memory for each run. The plain operations need a dozen passes."""
    params, mean, square = (tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors[:3])
    gradient, count, *settings = tensors[3:]
    of_runs = zip(*(number.tolist() for number in settings), strict=True)
    for run, (lr, beta1, beta2, weight_decay, shrinkage) in enumerate(of_runs):
        if shrinkage != 1.0:
            params[run].mul_(shrinkage)
        torch._fused_adam_(
            [params[run]],
            [gradient[run]],
            [mean[run]],
            [square[run]],
            [],
            [count[run]],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    return params, mean, square


def _correction(beta: Tensor | float, count: Tensor) -> Tensor:
    """1 - beta^count. A subtraction would lose four of float32's seven digits at beta = 0.999, count = 1."""
    if isinstance(beta, Tensor):
        return -torch.expm1(count * beta.log())
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))
