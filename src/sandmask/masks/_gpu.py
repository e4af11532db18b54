"""When and how stacked gradients go through the GPU kernels of `_triton`."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sandmask._physical import in_transform, on_all_runs
from sandmask.masks._functional import Scalar, TensorMoments
from sandmask.masks._packing import is_dense, unpack

if TYPE_CHECKING:
    from sandmask.masks._base import Mask


def launches(tensor: Tensor) -> bool:
    """Whether work on this tensor is launched on a device, where few launches beat many, and outside of `vmap`."""
    return tensor.device.type != "cpu" and not in_transform()


def kernels(stacks: Sequence[Tensor]) -> ModuleType | None:
    """The module of kernels if these gradients can go through it: on a GPU, with a torch that has Triton."""
    if not all(stack.device.type == "cuda" and launches(stack) for stack in stacks):
        return None
    try:
        from sandmask.masks import _triton
    except ImportError:
        return None
    return _triton


def moments_of_many(stacks: Sequence[Tensor]) -> list[TensorMoments] | None:
    """Moments of several stacks `[E, *shape]` by one kernel; None where that cannot be.

    Every stack is read in the order that a single gradient has in memory, and its moments have that order too.
    """
    triton = kernels(stacks)
    if triton is None:
        return None
    one = stacks[0]
    alike = all(s.dtype == one.dtype and s.device == one.device and len(s) == len(one) for s in stacks)
    if not alike or not all(is_dense(stack[0]) for stack in stacks):
        return None
    flat = torch.cat([s.as_strided((len(s), s[0].numel()), (s.stride(0), 1)) for s in stacks], dim=1)
    if not triton.takes(flat):
        return None
    gradients = [stack[0] for stack in stacks]
    parts = (unpack(moment, gradients) for moment in triton.stack_moments(flat))
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
