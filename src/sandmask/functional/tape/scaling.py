"""Gradients of logits, scaled so that float16 can hold what follows from them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sandmask._physical import leading


def scaled(logits: Tensor, n_envs: int, note: Callable[[Tensor], None]) -> Tensor:
    """The logits [N, classes] of one of K runs. Their gradient is multiplied, environment by environment.

    Factors are powers of two that bring an environment's largest gradient to about 64; float16 reaches from 6e-8 to
    65,504. They cannot be chosen by the losses: in float32 the loss of well-fitted examples is 0, but their gradients
    are not. `note` is given the inverse factors [K, E].
    """
    y: Tensor = _Scaled.apply(logits, n_envs, note)  # type: ignore[no-untyped-call]
    return y


class _Scaled(Function):
    @staticmethod
    def forward(logits: Tensor, n_envs: int, note: Callable[[Tensor], None]) -> Tensor:  # noqa: ARG004 - see backward
        return logits.view_as(logits)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        _, ctx.n_envs, ctx.note = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        by_env = grad.reshape(len(grad), ctx.n_envs, -1)
        largest = torch.linalg.vector_norm(by_env, torch.inf, dim=2, keepdim=True)
        scale = torch.exp2(6.0 - torch.round(torch.log2(largest.clamp(2.0**-100, 2.0**20))))
        ctx.note(1.0 / scale.squeeze(2))
        return (by_env * scale).view(grad.shape), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        y: Tensor = _Scaled.apply(*leading(info.batch_size, in_dims, args))  # type: ignore[no-untyped-call]
        return y, 0
