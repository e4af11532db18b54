"""Several processes: check that mode, mask and model agree, then merge moments or average gradients."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_norm

from sandmask.gradients._checks import Params, checked_parameters
from sandmask.gradients._losses import EnvironmentGradients, Losses
from sandmask.masks import GradientMoments, Mask, MaskError
from sandmask.masks._layout import Layout, check_kind
from sandmask.masks._two_pass import accumulation_dtype
from sandmask.masks._welford import Sums, buckets

Processes = Literal["merge", "average", "alone"]

About = tuple[torch.Size, torch.dtype, torch.dtype]  # a tensor: its shape, and the dtypes of moments and gradients

_BUCKET = 2**24  # elements that are added up at a time

# The tolerance for replicas on different hardware, which may differ by rounding. Two random initializations differ by
# far more.
_TOLERANCE = 1e-3

_CHOICES = (
    'Pass processes="merge" if every process has environments of its own, processes="average" if every process has a '
    "part of the data of each environment (as with DistributedSampler, Lightning and the Hugging Face Trainer), or "
    'processes="alone" if this process should use only its own losses.'
)


def resolve_processes(processes: Processes | None, group: dist.ProcessGroup | None) -> Processes:
    """Check the argument `processes`; "alone" in a single process.

    Only the user knows whether the processes hold different environments or parts of the same environments. Neither a
    parameter nor a loss shows whether it belongs to a `DistributedDataParallel` module.
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
    """Return the contents of all processes' messages. An error in one process is raised in all of them."""
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


@contextmanager
def telling(message: Message, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Report an error in this block to the other processes, which wait in `exchange`. It is raised in all of them."""
    try:
        yield
    except Exception as error:
        told = str(error) if isinstance(error, MaskError) else f"{type(error).__name__}: {error}"
        exchange(replace(message, error=told), group)
        raise


def message_of(processes: Processes, mask: Mask, named: Mapping[str, Tensor]) -> Message:
    """The message of a process: the mask's class and numbers, and the norms of the parameters (one synchronization)."""
    shown = []
    for name, value in vars(mask).items():
        number = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
        if isinstance(number, Real | str | None):
            shown.append(f"{name}={number!r}")
    norms = _foreach_norm([param.detach() for param in named.values()])
    together = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])
    by_name = dict(zip(named, together.tolist(), strict=True))
    return Message(processes, f"{type(mask).__name__}({', '.join(shown)})", by_name)


def _check_same_model(first: Mapping[str, float] | None, other: Mapping[str, float] | None, rank: int) -> None:
    if first is None or other is None:
        return
    if list(first) != list(other):
        raise MaskError(
            "Every process should have gradients of the same tensors, in the same order. Found different names or "
            f"orders in processes 0 and {rank} of the group."
        )
    for name, norm in first.items():
        if not math.isclose(norm, other[name], rel_tol=_TOLERANCE, abs_tol=1e-8) and not math.isnan(norm):
            raise MaskError(
                f"Every process should have the same model. Found different values of `{name}` in processes 0 and "
                f"{rank} of the group. Use the same seed in all processes, or wrap the model in "
                "`DistributedDataParallel`, which copies it to all of them. For independent models, pass "
                'processes="alone".'
            )


def moments_of_processes(
    losses: Losses,
    params: Params,
    mask: Mask,
    collect: Callable[..., GradientMoments],
    processes: Processes,
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Tensor], GradientMoments]:
    """Return the parameters by name and the moments of all processes' environments, equal in all processes."""
    with telling(Message(processes), group):
        named = checked_parameters(params, mask)
        message = message_of(processes, mask, named)
    if processes == "average":
        average = partial(averaged, named=named, group=group, message=message)
        return named, collect(losses, named, mask, transform=average)
    with telling(message, group):
        moments = collect(losses, named, mask)
    return named, merge(moments, group, message, named)


@dataclass(frozen=True)
class _Share:
    """Metadata of moments that processes exchange before they sum buffers."""

    count: int
    layout: Layout | None
    log_magnitude: bool
    tensors: dict[int, About]


@torch.no_grad()
def merge(
    moments: GradientMoments, group: dist.ProcessGroup | None, message: Message, named: Mapping[str, Tensor]
) -> GradientMoments:
    """Merge the moments of all processes. Each process changes its moments in place; all processes must call this.

    :param named: the parameters by name. Their devices are used for moments that this process lacks.
    """
    with telling(message, group):
        moments.check_finite()
    shares = _exchange_shares(moments, group, message)
    moments.merged = True
    total = sum(share.count for share in shares)
    layouts = [share.layout for share in shares if share.layout is not None]
    if total == 0 or not layouts:
        return moments
    moments.layout = layouts[0]
    tensors = {i: about for share in shares for i, about in share.tensors.items()}
    for i, (shape, kept, dtype) in sorted(tensors.items()):
        if i not in moments.position:
            like = torch.empty(shape, dtype=kept, device=_device(moments, named.get(layouts[0].names[i]), group))
            moments.open_slot(i, like, dtype)
    for bucket in buckets({i: (str(kept), shape.numel()) for i, (shape, kept, _) in tensors.items()}, _BUCKET):
        sums = moments.sums.take([moments.position[i] for i in bucket])
        reduce_sums(sums, moments.count, total, partial(dist.all_reduce, group=group))
    moments.count = total
    return moments


def flat(tensors: list[Tensor]) -> Tensor:
    """Join tensors to one vector, on the device of the first tensor."""
    return torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])


def _exchange_shares(moments: GradientMoments, group: dist.ProcessGroup | None, message: Message) -> list[_Share]:
    means, dtypes = moments.sums.mean, moments.dtypes
    tensors = {i: (means[at].shape, means[at].dtype, dtypes[at]) for i, at in moments.position.items()}
    mine = _Share(moments.count, moments.layout, moments.log_magnitude, tensors)
    shares: list[_Share] = exchange(replace(message, content=mine), group)
    alike = {(share.layout, share.log_magnitude) for share in shares if share.layout is not None}
    shapes = {(i, about[:2]) for share in shares for i, about in share.tensors.items()}
    if len(alike) > 1 or len(shapes) > len({i for i, _ in shapes}):
        raise MaskError("Every process should have gradients of the same tensors. Found different names or shapes.")
    return shares


def reduce_sums(sums: Sums, count: int, total: int, add_up: Callable[[Tensor], object]) -> None:
    """Merge the moments of `count` environments with the moments of other processes, in place.

    `total` is the number of environments of all processes. Signs and means are added up first, then deviations from
    the new mean. `add_up` adds up a tensor over processes, in place.
    """
    parts = [sums.sign_sum, sums.mean] if sums.log_sum is None else [sums.sign_sum, sums.mean, sums.log_sum]
    vectors = [flat(tensors) for tensors in parts]
    half_mean = vectors[1] * 0.5
    vectors[1] = half_mean * (count / total)
    joined = torch.cat(vectors)
    add_up(joined)
    reduced = list(joined.chunk(len(parts)))

    m2 = flat(sums.m2)
    if count > 0:  # 0 * inf would be NaN
        m2 = m2 + (half_mean - reduced[1]).square() * (4 * count)
    add_up(m2)

    # Weights such as 3/7 add up to 1 only up to rounding, so the mean of very large numbers may become inf.
    largest = torch.finfo(half_mean.dtype).max
    reduced[1] = (reduced[1] * 2).clamp(-largest, largest) + reduced[1] * 0  # keeps inf and NaN
    for tensors, values in zip([*parts, sums.m2], [*reduced, m2], strict=True):
        pieces = torch.split(values, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _device(moments: GradientMoments, param: Tensor | None, group: dist.ProcessGroup | None) -> torch.device:
    """The device for moments of a tensor that had no gradient in this process."""
    if param is not None:
        return param.device
    if moments.sums.mean:
        return moments.sums.mean[0].device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def averaged(
    environments: Iterator[EnvironmentGradients],
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    message: Message,
) -> Iterator[EnvironmentGradients]:
    """Yield the mean over processes of each environment's gradients; environments are matched by their order.

    The processes exchange a message before every environment, so that an error in one process is raised in all.
    A gradient that is `None` in some processes counts as zero there, as in `DistributedDataParallel`.
    """
    layout = Layout("mapping", tuple(named))
    while True:
        gradients: EnvironmentGradients | None = None  # frees the gradients of the previous environment
        with telling(message, group):
            gradients = next(environments, None)
            for i, grad in enumerate(gradients or []):
                if grad is not None:
                    check_kind(layout, i, grad)
        used = None if gradients is None else [grad is not None for grad in gradients]
        found: list[list[bool] | None] = exchange(replace(message, content=used), group)
        message = replace(message, norms=None)  # the models have been compared
        if gradients is None and not any(found):
            return
        if None in found or gradients is None:
            raise MaskError(
                'With processes="average" every process should have the same number of environments, in the same '
                f"order. Process {found.index(None)} of the group has fewer than the others."
            )
        used_by_any = [any(flags) for flags in zip(*(flags for flags in found if flags is not None), strict=True)]
        yield _mean(gradients, list(named.values()), used_by_any, group)


@torch.no_grad()
def _mean(
    gradients: EnvironmentGradients, params: Sequence[Tensor], used: Sequence[bool], group: dist.ProcessGroup | None
) -> EnvironmentGradients:
    means: EnvironmentGradients = [None] * len(gradients)
    share = 1 / dist.get_world_size(group)
    dtypes = [accumulation_dtype(param.dtype) for param in params]
    tensors = {i: (str(dtypes[i]), param.numel()) for i, param in enumerate(params) if used[i]}
    for bucket in buckets(tensors, _BUCKET):
        parts = [torch.zeros_like(params[i]) if (grad := gradients[i]) is None else grad for i in bucket]
        total = flat([part.to(dtypes[i]) for i, part in zip(bucket, parts, strict=True)]) * share
        dist.all_reduce(total, group=group)
        pieces = torch.split(total, [part.numel() for part in parts])
        for i, part, piece in zip(bucket, parts, pieces, strict=True):
            means[i] = piece.view(part.shape).to(part.device)
    return means
