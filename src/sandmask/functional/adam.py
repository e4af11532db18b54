"""Adam as a pure function, equal to `torch.optim.Adam` to rounding; every number may be a per-run tensor."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class AdamState(NamedTuple):
    """Running means of a flat gradient and of its square, and the number of steps taken."""

    mean: Tensor
    square: Tensor
    count: Tensor  # type: ignore[assignment]  # hides `tuple.count`, which nobody needs here


def adam_init(params: Tensor) -> AdamState:
    """The state before the first step."""
    zero = torch.zeros_like(params)
    return AdamState(zero, zero.clone(), torch.zeros((), device=params.device))


def adam_reset(state: AdamState, when: Tensor) -> AdamState:
    """The state, or a fresh one where `when` is true."""
    keep = 1.0 - when.to(state.count.dtype)
    return AdamState(*(field * keep for field in state))


def adam_step(
    params: Tensor,
    gradient: Tensor,
    state: AdamState,
    lr: Tensor | float,
    weight_decay: Tensor | float = 0.0,
    betas: tuple[Tensor | float, Tensor | float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, AdamState]:
    """One step; weight decay is added to the gradient, after any mask, as `torch.optim.Adam` does it."""
    gradient = gradient + weight_decay * params
    count = state.count + 1.0
    mean = state.mean + (1.0 - betas[0]) * (gradient - state.mean)
    square = betas[1] * state.square + (1.0 - betas[1]) * gradient * gradient
    denominator = square.sqrt() / _correction(betas[1], count).sqrt() + eps
    return params - (lr / _correction(betas[0], count)) * mean / denominator, AdamState(mean, square, count)


def _correction(beta: Tensor | float, count: Tensor) -> Tensor:
    """1 - beta^count. Subtracting would lose four of float32's seven digits at beta = 0.999, count = 1."""
    if isinstance(beta, Tensor):
        return -torch.expm1(count * beta.log())
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))
