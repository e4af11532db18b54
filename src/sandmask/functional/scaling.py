"""Scaling of gradients by powers of two, so that they fit into the small range of float16 and of halves (see `split`).

Each environment's gradients are scaled by themselves: otherwise those of an environment that is fitted far better than
others would be 0, and have no sign. The same is true of examples. But weights' gradients are sums over examples of an
input times a gradient, so an example's scale cannot be undone after the sum. It is undone before it, on the side of the
input, and this halves the bits that either side needs: a gradient is divided by the square root of its size, its root,
and the input is multiplied by it.
"""

import torch
from torch import Tensor

from sandmask._physical import has_kernels

TARGET = 7  # an environment's largest gradient becomes 2^6 .. 2^7
LIMITS = (2.0**-100, 2.0**20)  # of sizes
LEAST = -38  # Halves of an input are at most 2^15: times the smallest root, 2^-38, they still fit into float16.


def scale(grad: Tensor, n_envs: int, *, by_row: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The logits' gradients [K, N, classes] of K runs, scaled environment by environment and, if wanted, row by row.

    Also returns the factors [K, E] that undo the first, and the roots [K, N] that undo the second. Roots are powers of
    four, because kernels multiply by their square roots, twice. Scales cannot be chosen by the losses: in float32 the
    loss of well-fitted examples is 0, but their gradients are not.
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
