"""Scaling of gradients by powers of two, so that they fit into the small range of float16 and of halves (see `split`).

Each environment has its own scale. Otherwise, if one environment is fitted far better than others, its gradients would
become 0 and have no sign. The same is true of examples. But the gradient of a weight is a sum over examples of input
times gradient, so the scale of an example cannot be undone after the sum. Instead, the gradient of an example is
divided by the square root of its size, its root, and the input is multiplied by the root. This halves the number of
bits that either side needs.
"""

import torch
from torch import Tensor

from sandmask._physical import has_kernels

TARGET = 7  # the largest gradient of an environment becomes 2^6 .. 2^7
LIMITS = (2.0**-100, 2.0**20)  # range of sizes
LEAST = -38  # exponent of the smallest root: halves of an input are at most 2^15, and times 2^-38 fit into float16


def scale(grad: Tensor, n_envs: int, *, by_row: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scale the gradients [K, N, classes] of the logits of K runs by environment and, with `by_row`, also by row.

    Roots are powers of four, because kernels multiply twice by their square roots. Losses cannot determine the scales:
    in float32, the loss of a well-fitted example is 0, but its gradient is not.

    :param grad: the gradients.
    :param n_envs: number of environments.
    :param by_row: also scale each row.
    :return: the scaled gradients, the factors [K, E] that undo the scaling by environment, and the roots [K, N] that
        undo the scaling by row.
    """
    least = LEAST if by_row else None
    if has_kernels(grad) and grad.dtype == torch.float32:
        from sandmask.functional.kernels import scaling as kernels

        return kernels.scale(grad, n_envs, TARGET, LIMITS, least)
    return plain_scale(grad, n_envs, least)


def plain_scale(grad: Tensor, n_envs: int, least: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`scale` in torch's operations."""
    by_env = grad.reshape(len(grad), n_envs, -1, grad.shape[2])
    of_row = torch.frexp(torch.linalg.vector_norm(by_env, torch.inf, dim=3).clamp(*LIMITS)).exponent
    of_env = of_row.amax(2)
    scaled = by_env * _power(TARGET - of_env, grad.dtype)[..., None, None]
    unscale = _power(of_env - TARGET, grad.dtype)
    if least is None:
        return scaled.view(grad.shape), unscale, None
    roots = _power((((of_row - of_env.unsqueeze(2) + 2) >> 2) * 2).clamp_min(least), grad.dtype)
    return (scaled / roots.unsqueeze(3)).view(grad.shape), unscale, roots.flatten(1)


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent)
