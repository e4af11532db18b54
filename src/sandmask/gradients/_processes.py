"""Checks that all processes use the same mode, mask and model before they compare gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_norm

from sandmask.masks import Mask, MaskError

Processes = Literal["merge", "average", "alone"]

# Replicas on different hardware may differ by rounding; two random initializations differ by far more than this.
_TOLERANCE = 1e-3

_CHOICES = (
    'Pass processes="merge" if every process has environments of its own, processes="average" if every process has a '
    "part of the data of each environment (as with DistributedSampler, Lightning and the Hugging Face Trainer), or "
    'processes="alone" if this process should use only its own losses.'
)


def resolve_processes(processes: Processes | None, group: dist.ProcessGroup | None) -> Processes:
    """Check the argument `processes`; "alone" in a single process.

    Whether a parameter belongs to a `DistributedDataParallel` module cannot be seen from it, nor from a loss, and only
    the user knows whether the processes hold different environments or parts of the same ones.
    """
    if processes is not None and processes not in get_args(Processes):
        raise MaskError(
            f"Parameter `processes` should be one of {get_args(Processes)}. Found `processes` = {processes!r}."
        )
    if not (dist.is_available() and dist.is_initialized()) or (size := dist.get_world_size(group)) == 1:
        return "alone"
    if processes is None:
        raise MaskError(
            f"torch.distributed is initialized with {size} processes, so parameter `processes` is required: "
            f"`DistributedDataParallel` does not average masked gradients. {_CHOICES}"
        )
    return processes


def check_initialized() -> None:
    """Raise unless there is a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise MaskError(
            "sandmask.distributed needs a process group. Start the script with torchrun and call "
            "`torch.distributed.init_process_group` first, or use `sandmask.backward` in a single process."
        )


@dataclass(frozen=True)
class Message:
    """The message that processes exchange before they sum buffers."""

    processes: Processes
    mask: str | None = None
    norms: Mapping[str, float] | None = None
    """Parameter name -> norm, to detect different models."""
    error: str | None = None
    content: Any = None


def exchange(message: Message, group: dist.ProcessGroup | None) -> list[Any]:
    """The contents of all processes' messages; raises, in every process, what is wrong in any of them."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, message, group=group)
    messages: list[Message] = gathered
    for rank, found in enumerate(messages):
        if found.error is not None:
            raise MaskError(f"In process {rank} of the group: {found.error}")
    first = messages[0]
    for rank, found in enumerate(messages):
        where = f"Found process 0 with {{}} and process {rank} of the group with {{}}."
        if found.processes != first.processes:
            raise MaskError(
                "Every process should pass the same `processes`. " + where.format(first.processes, found.processes)
            )
        if found.mask != first.mask:
            raise MaskError("Every process should use the same mask. " + where.format(first.mask, found.mask))
        _check_same_model(first.norms, found.norms, rank)
    return [found.content for found in messages]


def describe_mask(mask: Mask) -> str:
    """The mask's class and its numbers, to be compared between processes."""
    values = {name: value.item() if _is_number(value) else value for name, value in vars(mask).items()}
    shown = (f"{name}={value!r}" for name, value in values.items() if isinstance(value, Real | str | None))
    return f"{type(mask).__name__}({', '.join(shown)})"


def parameter_norms(named: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of every parameter, with one synchronization."""
    norms = _foreach_norm([param.detach() for param in named.values()])
    together = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])
    return dict(zip(named, together.tolist(), strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _check_same_model(first: Mapping[str, float] | None, other: Mapping[str, float] | None, rank: int) -> None:
    if first is None or other is None:
        return
    if list(first) != list(other):
        raise MaskError(
            "Every process should have gradients of the same tensors. Found different names, or the same in another "
            f"order, in processes 0 and {rank} of the group."
        )
    for name, norm in first.items():
        if not math.isclose(norm, other[name], rel_tol=_TOLERANCE, abs_tol=1e-8) and not math.isnan(norm):
            raise MaskError(
                f"Every process should have the same model. Found another value of `{name}` in process {rank} of the "
                "group than in process 0. Seed the processes alike, or wrap the model in `DistributedDataParallel`, "
                'which copies it to all of them. For models that are independent, pass processes="alone".'
            )
