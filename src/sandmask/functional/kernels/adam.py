"""A step of Adam for K runs as one GPU kernel. The equivalent in torch is `adam.plain_adam_step`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adam_kernel(
    vector,  # not `params`: Triton's own code has a variable of that name
    gradient,
    mean,
    square,
    decay,
    beta1,
    beta2,
    rate,
    correction,
    shrinkage,
    new_vector,
    new_mean,
    new_square,
    numel,
    vector_run,
    gradient_run,
    eps: tl.constexpr,
    block: tl.constexpr,
):
    run = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < numel
    p = tl.load(vector + run * vector_run + place, mask=inside) * tl.load(shrinkage + run)
    g = tl.load(gradient + run * gradient_run + place, mask=inside) + tl.load(decay + run) * p
    place = run * numel + place
    m = tl.load(mean + place, mask=inside)
    v = tl.load(square + place, mask=inside)
    b1, b2 = tl.load(beta1 + run), tl.load(beta2 + run)
    m += (1.0 - b1) * (g - m)
    v = b2 * v + (1.0 - b2) * g * g
    step = tl.load(rate + run) * m / (tl.sqrt_rn(v) / tl.load(correction + run) + eps)
    tl.store(new_vector + place, p - step, mask=inside)
    tl.store(new_mean + place, m, mask=inside)
    tl.store(new_square + place, v, mask=inside)


def adam(
    params: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *settings: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new parameters and running means [K, P]. The given tensors may be parts of longer rows.

    `settings` are each [K]: weight decay, both betas, the learning rate divided by the first correction, the root of
    the second correction, and the factor by which decoupled weight decay shrinks the parameters.
    """
    outs = [torch.empty(params.shape, device=params.device) for _ in range(3)]
    numel = params.shape[1]
    launch: Any = _adam_kernel[(triton.cdiv(numel, BLOCK), len(params))]
    params, gradient = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (params, gradient))
    tensors = [params, gradient, *(tensor.contiguous() for tensor in (mean, square, *settings))]
    launch(*tensors, *outs, numel, params.stride(0), gradient.stride(0), eps=eps, block=BLOCK)
    return outs[0], outs[1], outs[2]
