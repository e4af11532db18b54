"""Few launches on a GPU: many tensors as one, and gradients `[E, *shape]` through the kernels of `_triton`."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sandmask._physical import in_transform, on_all_runs
from sandmask.masks._functional import Scalar, TensorMoments
from sandmask.masks._welford import Sums

if TYPE_CHECKING:
    from sandmask.masks._base import Mask

CHEAP = 2**18  # numbers whose copy takes a CPU less time than a few calls


def launches(tensor: Tensor) -> bool:
    """Whether work on this tensor is launched on a device, where few launches beat many, and outside of `vmap`."""
    return tensor.device.type != "cpu" and not in_transform()


def packs(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are better worked on as one: on a device always, on a CPU while a copy of all is cheap."""
    if len(tensors) == 1 or in_transform():
        return False
    return tensors[0].device.type != "cpu" or sum(tensor.numel() for tensor in tensors) <= CHEAP


def kernels(gradients: Sequence[Tensor]) -> ModuleType | None:
    """The module of kernels if these gradients can go through it: on a GPU, with a torch that has Triton."""
    if not all(gradient.device.type == "cuda" and launches(gradient) for gradient in gradients):
        return None
    try:
        from sandmask.masks import _triton
    except ImportError:
        return None
    return _triton


def moments_of_many(gradients: Sequence[Tensor]) -> list[TensorMoments] | None:
    """Moments of several tensors' gradients `[E, *shape]` by one kernel; None where that cannot be.

    Each is read in the order that the gradient of one environment has in memory, and its moments have that order too.
    """
    triton = kernels(gradients)
    if triton is None:
        return None
    one = gradients[0]
    alike = all(s.dtype == one.dtype and s.device == one.device and len(s) == len(one) for s in gradients)
    if not alike or not all(is_dense(gradient[0]) for gradient in gradients):
        return None
    flat = torch.cat([s.as_strided((len(s), s[0].numel()), (s.stride(0), 1)) for s in gradients], dim=1)
    if not triton.takes(flat):
        return None
    one_environment = [gradient[0] for gradient in gradients]
    parts = (unpack(moment, one_environment) for moment in triton.moments(flat))
    return [TensorMoments(len(one), *of_one) for of_one in zip(*parts, strict=True)]


def weigh_by_kernel(mask: "Mask", moments: TensorMoments) -> tuple[Tensor, Tensor] | None:
    """The mask and the masked mean by one kernel, for all runs of a stack; None for masks that it does not know."""
    from sandmask.masks import _triton

    kind = _triton.kind_of(mask)
    if kind is None:
        return None
    zero = torch.zeros((), device=moments.mean.device)
    tau, gain = (zero + number for number in (mask.tau, _gain(mask)))
    kernel = partial(_triton.weigh, count=moments.count, kind=kind)
    weights, masked = on_all_runs(kernel, moments.sign_sum, moments.mean, moments.m2, tau, gain)
    return weights, masked


def _gain(mask: "Mask") -> Scalar:
    gain: Scalar | None = getattr(mask, "gain", None)
    return 1.0 if gain is None else gain


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
