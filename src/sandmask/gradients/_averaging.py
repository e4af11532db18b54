"""Average each environment's gradient over processes that hold parts of its data, before the mask is applied."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sandmask.gradients._losses import EnvironmentGradients
from sandmask.gradients._merging import buckets, flat
from sandmask.gradients._processes import Message, exchange
from sandmask.masks import MaskError
from sandmask.masks._layout import Layout, check_kind
from sandmask.masks._two_pass import accumulation_dtype


def averaged(
    environments: Iterator[EnvironmentGradients],
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    message: Message,
) -> Iterator[EnvironmentGradients]:
    """Yield the mean over processes of each environment's gradients; environments are matched by their order.

    The processes exchange a message before every environment, so that a mistake in one of them is raised in all.
    A gradient that is `None` in some processes counts as zero there, as it does in `DistributedDataParallel`.
    """
    while True:
        gradients: EnvironmentGradients | None = None
        try:
            gradients = next(environments, None)
            _check_kinds(named, gradients)
        except Exception as error:
            exchange(replace(message, error=describe_error(error)), group)
            raise
        used = None if gradients is None else [grad is not None for grad in gradients]
        found: list[list[bool] | None] = exchange(replace(message, content=used), group)
        message = replace(message, norms=None)  # the models were compared
        if gradients is None and not any(found):
            return
        if None in found or gradients is None:
            raise MaskError(
                'With processes="average" every process should have the same number of environments, in the same '
                f"order. Process {found.index(None)} of the group has fewer than the others."
            )
        used_by_any = [any(flags) for flags in zip(*(flags for flags in found if flags is not None), strict=True)]
        yield _mean(gradients, list(named.values()), used_by_any, group)


def describe_error(error: Exception) -> str:
    """The error as the other processes report it."""
    return str(error) if isinstance(error, MaskError) else f"{type(error).__name__}: {error}"


def _check_kinds(named: Mapping[str, Tensor], gradients: EnvironmentGradients | None) -> None:
    layout = Layout("mapping", tuple(named))
    for i, grad in enumerate(gradients or []):
        if grad is not None:
            check_kind(layout, i, grad)


@torch.no_grad()
def _mean(
    gradients: EnvironmentGradients, params: Sequence[Tensor], used: Sequence[bool], group: dist.ProcessGroup | None
) -> EnvironmentGradients:
    means: EnvironmentGradients = [None] * len(gradients)
    share = 1 / dist.get_world_size(group)
    sizes = {i: (param.numel(), accumulation_dtype(param.dtype)) for i, param in enumerate(params) if used[i]}
    for bucket in buckets(sizes):
        parts = [torch.zeros_like(params[i]) if (grad := gradients[i]) is None else grad for i in bucket]
        total = flat([part.to(sizes[i][1]) for i, part in zip(bucket, parts, strict=True)]) * share
        dist.all_reduce(total, group=group)
        pieces = torch.split(total, [part.numel() for part in parts])
        for i, part, piece in zip(bucket, parts, pieces, strict=True):
            means[i] = piece.view(part.shape).to(part.device)
    return means
