"""A flat masked gradient divided by the density of its mask, tensor by tensor."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sandmask._physical import has_kernels, on_all_runs
from sandmask.masks import rescale_by_sparsity


def rescale_tensors(masked: Tensor, weights: Tensor, sizes: Sequence[int], wanted: Tensor | None = None) -> Tensor:
    """Divide each tensor's piece of a flat masked gradient by the mean of its mask; works under `vmap`.

    :param masked: masked gradient `[P]`.
    :param weights: the mask `[P]`.
    :param sizes: numbers of elements of the tensors, which sum to P.
    :param wanted: 0-dimensional tensor; if it is not above 0, the gradient is not divided. If not given, it is divided.
    :return: the rescaled gradient `[P]`.
    """
    if masked.ndim == 1 and has_kernels(masked):
        from sandmask.functional.kernels import rescaling as kernels

        wanted = torch.ones((), device=masked.device) if wanted is None else wanted
        kernel = partial(kernels.rescale, sizes=tuple(sizes))
        return on_all_runs(kernel, masked, weights, wanted)[0]
    return plain_rescale_tensors(masked, weights, sizes, wanted)


def plain_rescale_tensors(
    masked: Tensor, weights: Tensor, sizes: Sequence[int], wanted: Tensor | None = None
) -> Tensor:
    """`rescale_tensors` in torch's operations, several for each tensor."""
    pieces = zip(torch.split(masked, list(sizes)), torch.split(weights, list(sizes)), strict=True)
    rescaled = torch.cat([rescale_by_sparsity(piece, mask) for piece, mask in pieces])
    return rescaled if wanted is None else torch.where(wanted > 0, rescaled, masked)
