"""Merge the moments of all processes with all-reduce: the formula of Chan et al., as sums over processes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sandmask.gradients._processes import Message, exchange
from sandmask.masks import GradientMoments, MaskError
from sandmask.masks._layout import Layout
from sandmask.masks._welford import Sums

_BUCKET = 2**24  # elements that are added up at a time

About = tuple[torch.Size, torch.dtype, torch.dtype]


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
    """Merge the moments of all processes into each one's, in place; all processes must call it.

    :param named: the parameters, by name, which say on what device moments belong.
    """
    if message.error is None:
        try:
            moments.check_finite()
        except MaskError as mistake:
            message = replace(message, error=str(mistake))
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
    for bucket in buckets({i: (about[0].numel(), about[1]) for i, about in tensors.items()}):
        sums = moments.sums.take([moments.position[i] for i in bucket])
        reduce_sums(sums, moments.count, total, partial(dist.all_reduce, group=group))
    moments.count = total
    return moments


def buckets(tensors: Mapping[int, tuple[int, torch.dtype]]) -> Iterator[list[int]]:
    """Tensors to reduce together, chosen by dtype and size only, so that all processes agree."""
    for kept in sorted({dtype for _, dtype in tensors.values()}, key=str):
        bucket: list[int] = []
        size = 0
        for i in sorted(i for i, (_, dtype) in tensors.items() if dtype == kept):
            if bucket and size + tensors[i][0] > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += tensors[i][0]
        yield bucket


def flat(tensors: list[Tensor]) -> Tensor:
    """The tensors as one vector, on the device of the first."""
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
    """Merge the moments of `count` environments with those of other processes, `total` in all, in place.

    Signs and means are added up first, then deviations from the new mean.

    :param sums: the moments of this process.
    :param count: the number of this process's environments.
    :param total: the number of all of them.
    :param add_up: adds up a tensor over processes, in place.
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

    # Weights such as 3/7 add up to 1 but for rounding: the mean of the largest numbers may come out as inf.
    largest = torch.finfo(half_mean.dtype).max
    reduced[1] = (reduced[1] * 2).clamp(-largest, largest) + reduced[1] * 0  # what was not finite stays so
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
