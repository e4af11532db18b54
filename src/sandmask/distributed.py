"""Environments spread over processes: moments are merged with all-reduce before the mask sees them.

Do not wrap the model in `DistributedDataParallel` for this. It averages gradients over the processes during
the backward pass; a mask has to compare the environments' gradients *before* they are averaged, and once
they are, the signs and sizes that it compares are gone. Each process would then mask the same average, and
find in it perfect agreement. What can be added up over processes, exactly, are the moments: counts, sums of
signs, means, and sums of squared deviations.

Each process holds the same model, computes the losses of its own environments, and calls

    sandmask.distributed.backward(losses_of_this_process, model.named_parameters(), mask)

after which `.grad` is the same in every process, and equal to what one process with all environments
computes. Processes may have different numbers of environments, also none, as long as there are two in all.
Two buffers of the model's size are added up in a first all-reduce, one in a second.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from sandmask.gradients._backward import collect_moments, fill_gradients
from sandmask.gradients._losses import Losses
from sandmask.gradients._params import Params, check_mask, trainable_parameters
from sandmask.gradients._report import MaskReport
from sandmask.gradients._scaling import Scaling
from sandmask.masks import GradientMoments, Mask, MaskError
from sandmask.masks._layout import Layout

__all__ = ["backward", "merge_moments"]

_BUCKET = 2**24


def backward(
    losses: Losses,
    params: Params,
    mask: Mask,
    *,
    group: dist.ProcessGroup | None = None,
    scaler: GradScaler | None = None,
    retain_graph: bool = False,
    check_finite: bool = True,
    on_report: Callable[[MaskReport], object] | None = None,
) -> MaskReport:
    """`sandmask.backward` over the environments of all processes; every process ends with the same `.grad`.

    All processes of the group must call it, with the same parameters and mask. A mistake or a gradient that
    is not finite in one of them is raised in all, so that none is left waiting.

    :param losses: the losses of this process's environments; an empty list where it has none.
    :param group: the process group; the default one if left out.

    The other parameters are those of `sandmask.backward`.
    """
    _check_initialized()
    check_mask(mask)
    named = trainable_parameters(params)
    scaling = Scaling(scaler)
    moments, error = mask.new_moments(), None
    try:
        moments = collect_moments(losses, named, mask, scaling, retain_graph=retain_graph, check_finite=check_finite)
    except MaskError as mistake:
        error = str(mistake)
    merged = _merge(moments, group, named, error)
    report = fill_gradients(named, mask, merged, scaling)
    if on_report is not None:
        on_report(report)
    return report


def merge_moments(moments: GradientMoments, group: dist.ProcessGroup | None = None) -> GradientMoments:
    """Merge the moments of all processes of the group into each one's, in place; returns them.

    The formula of Chan et al., as sums over processes: the same numbers, to rounding, as one process gets
    that folds in all environments. A process without any environment passes empty moments,
    `mask.new_moments()`.
    """
    _check_initialized()
    return _merge(moments, group, {}, None)


@dataclass(frozen=True)
class _Share:
    """What the processes must know of each other before they can add up buffers."""

    count: int
    layout: Layout | None
    log_magnitude: bool
    tensors: dict[int, tuple[torch.Size, torch.dtype, torch.dtype]]
    error: str | None


@torch.no_grad()
def _merge(
    moments: GradientMoments, group: dist.ProcessGroup | None, named: Mapping[str, Tensor], error: str | None
) -> GradientMoments:
    if error is None:
        try:
            moments.check_finite()
        except MaskError as mistake:
            error = str(mistake)
    shares = _exchange(moments, group, error)
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
    for bucket in _buckets(tensors):
        _reduce([moments.position[i] for i in bucket], moments, total, group)
    moments.count = total
    return moments


def _exchange(moments: GradientMoments, group: dist.ProcessGroup | None, error: str | None) -> list[_Share]:
    """Every process's share; raises, in all processes alike, what is wrong in any of them."""
    means, dtypes = moments.sums.mean, moments.dtypes
    tensors = {i: (means[at].shape, means[at].dtype, dtypes[at]) for i, at in moments.position.items()}
    mine = _Share(moments.count, moments.layout, moments.log_magnitude, tensors, error)
    gathered: list[_Share | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    shares = [share for share in gathered if share is not None]
    for rank, share in enumerate(shares):
        if share.error is not None:
            raise MaskError(f"In process {rank} of the group: {share.error}")
    alike = {(share.layout, share.log_magnitude) for share in shares if share.layout is not None}
    shapes = {(i, about[:2]) for share in shares for i, about in share.tensors.items()}
    if len(alike) > 1 or len(shapes) > len({i for i, _ in shapes}):
        raise MaskError("Every process should have gradients of the same tensors. Found different names or shapes.")
    return shares


def _buckets(tensors: Mapping[int, tuple[torch.Size, torch.dtype, torch.dtype]]) -> Iterator[list[int]]:
    """Tensors to reduce together; by dtype and size alone, so that all processes come to the same."""
    for kept in sorted({about[1] for about in tensors.values()}, key=str):
        bucket: list[int] = []
        size = 0
        for i in sorted(i for i, about in tensors.items() if about[1] == kept):
            if bucket and size + tensors[i][0].numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += tensors[i][0].numel()
        yield bucket


def _reduce(positions: list[int], moments: GradientMoments, total: int, group: dist.ProcessGroup | None) -> None:
    """Add up the moments at these positions: signs and means first, then deviations from the new mean."""
    sums = moments.sums.take(positions)
    parts = [sums.sign_sum, sums.mean] if sums.log_sum is None else [sums.sign_sum, sums.mean, sums.log_sum]
    flat = [_flat(tensors) for tensors in parts]
    half_mean = flat[1] * 0.5
    flat[1] = half_mean * (moments.count / total)
    joined = torch.cat(flat)
    dist.all_reduce(joined, group=group)
    reduced = list(joined.chunk(len(parts)))

    m2 = _flat(sums.m2)
    if moments.count > 0:  # 0 * inf would be NaN
        m2 = m2 + (half_mean - reduced[1]).square() * (4 * moments.count)
    dist.all_reduce(m2, group=group)

    # Weights such as 3/7 add up to 1 but for rounding: the mean of the largest numbers may come out as inf.
    largest = torch.finfo(half_mean.dtype).max
    reduced[1] = (reduced[1] * 2).clamp(-largest, largest) + reduced[1] * 0  # what was not finite stays so
    for tensors, values in zip([*parts, sums.m2], [*reduced, m2], strict=True):
        pieces = torch.split(values, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])


def _device(moments: GradientMoments, param: Tensor | None, group: dist.ProcessGroup | None) -> torch.device:
    """Where to keep the moments of a tensor that had no gradient in this process."""
    if param is not None:
        return param.device
    if moments.sums.mean:
        return moments.sums.mean[0].device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _check_initialized() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise MaskError(
            "sandmask.distributed needs a process group. Start the script with torchrun and call "
            "`torch.distributed.init_process_group` first, or use `sandmask.backward` in a single process."
        )
