"""Reduce kernel launches on a GPU: process many tensors as one, and use the kernels of `_triton`."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sandmask._physical import in_transform, is_traced, on_all_runs
from sandmask.masks._functional import Scalar, TensorMoments
from sandmask.masks._two_pass import gradient_moments
from sandmask.masks._welford import Sums

if TYPE_CHECKING:
    from sandmask.masks._base import Mask

CHEAP = 2**18  # a CPU copies this many numbers in less time than a few calls take


def packs(tensors: Sequence[Tensor]) -> bool:
    """Whether to process tensors as one: always on a GPU, and on a CPU if copying them is cheap."""
    if len(tensors) == 1 or in_transform():
        return False
    return tensors[0].device.type != "cpu" or sum(tensor.numel() for tensor in tensors) <= CHEAP


def kernels(gradients: Sequence[Tensor]) -> ModuleType | None:
    """The module of kernels if it supports these gradients: on a GPU, with a version of torch that has Triton."""
    if in_transform() or not all(gradient.device.type == "cuda" for gradient in gradients):
        return None
    try:
        from sandmask.masks import _triton
    except ImportError:
        return None
    return _triton


def masked_mean_by_kernel(mask: "Mask", grads: Tensor) -> Tensor | None:
    """The masked mean of gradients `[E, *shape]` by one kernel; None if no kernel supports them."""
    triton = kernels([grads])
    if triton is None or not triton.supports(mask, grads):
        return None
    masked: Tensor = triton.masked_mean(mask, grads)
    return masked


def moments_of_many(gradients: Sequence[Tensor]) -> list[TensorMoments] | None:
    """Moments of several tensors' gradients `[E, *shape]` by one kernel; None if no kernel supports them.

    Each tensor is read in the memory order of one environment's gradient, and its moments have the same order.
    """
    triton = kernels(gradients)
    if triton is None:
        return None
    one_environment = [gradient[0] for gradient in gradients]
    alike = {(gradient.dtype, gradient.device, len(gradient)) for gradient in gradients}
    if len(alike) > 1 or not all(map(is_dense, one_environment)):
        return None
    rows = [s.as_strided((len(s), s[0].numel()), (s.stride(0), 1)) for s in gradients]
    flat = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    if not triton.takes(flat):
        return None
    parts = (unpack(moment, one_environment) for moment in triton.moments(flat))
    return [TensorMoments(len(flat), *of_one) for of_one in zip(*parts, strict=True)]


def moments_of_parts(parts: Sequence[Tensor]) -> TensorMoments:
    """Compute moments over environments of gradients `[E, P]` from parts of them.

    :param parts: gradients `[E, n]`, one after the other; they may differ in dtype.
    :return: moments `[P]`, in float32.
    """
    triton = kernels(parts)
    if triton is None or not all(map(triton.takes, parts)):
        each = [gradient_moments(part) for part in parts]
        sums = zip(*((one.sign_sum, one.mean, one.m2) for one in each), strict=True)
        return TensorMoments(len(parts[0]), *(torch.cat(of_parts) for of_parts in sums))
    sizes = [part.shape[1] for part in parts]
    moments = torch.empty(3, sum(sizes), device=parts[0].device)
    for part, outs in zip(parts, torch.split(moments, sizes, dim=1), strict=True):
        triton.moments(part, outs.unbind(0))
    return TensorMoments(len(parts[0]), *moments)


def weigh_by_kernel(mask: "Mask", moments: TensorMoments) -> tuple[Tensor, Tensor] | None:
    """The mask and the masked mean of all runs of a stack by one kernel; None if no kernel supports the mask."""
    from sandmask.masks import _triton

    kind = _triton.kind_of(mask)
    if kind is None:
        return None
    zero = torch.zeros((), device=moments.mean.device)
    gain: Scalar | None = getattr(mask, "gain", None)
    numbers = zero + mask.tau, zero + (1.0 if gain is None else gain)
    kernel = partial(_triton.weigh, count=moments.count, kind=kind)
    weights, masked = on_all_runs(kernel, moments.sign_sum, moments.mean, moments.m2, *numbers)
    return weights, masked


def in_memory_order(positions: Sequence[int], tensors: Sequence[Tensor]) -> Sequence[int]:
    """The positions of tensors, sorted by address, so that `pack` finds tensors that are adjacent in memory."""
    if is_traced() or tensors[0].device.type != "cpu":
        return positions
    return sorted(positions, key=lambda position: tensors[position].data_ptr())


def pack(sums: Sums, count: int) -> TensorMoments:
    """Concatenate the moments of several tensors, each in the memory order of its mean."""

    def flat(tensors: Sequence[Tensor]) -> Tensor:
        if (joined := _joined(tensors)) is not None:
            return joined
        return torch.cat([_in_order_of(tensor, mean) for tensor, mean in zip(tensors, sums.mean, strict=True)])

    logs = None if sums.log_sum is None else flat(sums.log_sum)
    return TensorMoments(count, flat(sums.sign_sum), flat(sums.mean), flat(sums.m2), logs)


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split the flat tensor into views with the shapes and strides of `like`.

    The strides (such as channels last) matter, because optimizers are fast only if gradients and parameters have equal
    strides.
    """
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [
        piece.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else piece.view(tensor.shape)
        for piece, tensor in zip(pieces, like, strict=True)
    ]


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """A flat view of tensors that are adjacent in a CPU's memory; None if they are not."""
    first = tensors[0]
    if is_traced() or first.device.type != "cpu":
        return None
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    return first.as_strided(((end - first.data_ptr()) // first.itemsize,), (1,))


def _in_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    if not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is not empty and its elements are contiguous in memory, in any order."""
    return tensor.numel() > 0 and (tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor)))
