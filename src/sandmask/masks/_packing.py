"""Work on many tensors as one: a launch costs the same for a bias as for a whole model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask.masks._functional import TensorMoments
from sandmask.masks._welford import Sums


def pack(sums: Sums, count: int) -> TensorMoments:
    """Flat moments of several tensors, one after the other."""
    logs = None if sums.log_sum is None else _flat(sums.log_sum, sums.mean)
    sign_sum, mean, m2 = (_flat(tensors, sums.mean) for tensors in (sums.sign_sum, sums.mean, sums.m2))
    return TensorMoments(count, sign_sum, mean, m2, logs)


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the flat tensor, with the shapes and strides of `like`.

    Strides are kept (channels last), because optimizers are fast only if gradients have the strides of parameters.
    """
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [
        piece.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else piece.view(tensor.shape)
        for piece, tensor in zip(pieces, like, strict=True)
    ]


def _flat(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """The tensors' elements, each tensor in the memory order of its counterpart in `like`."""
    return torch.cat([_in_order_of(tensor, model) for tensor, model in zip(tensors, like, strict=True)])


def _in_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    if not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements are contiguous in memory, in any order."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
