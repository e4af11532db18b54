"""Environments in several processes: moments are merged with all-reduce before the mask is applied.

Each process holds the same model, computes the losses of its own environments, and calls

    sandmask.distributed.backward(losses_of_this_process, model.named_parameters(), mask)

after which `.grad` is the same in every process, and equal to what one process with all environments
computes. Processes may have different numbers of environments, also none, as long as there are two in all.
Counts, sums of signs, means and sums of squared deviations can be added up over processes exactly. Two
buffers of the model's size are added up in a first all-reduce, one in a second.

The call is short for `sandmask.backward(..., processes="merge")`. The model may be wrapped in
`DistributedDataParallel`, which then copies it to all processes but does not average gradients: it does so
only when `Tensor.backward` accumulates into `.grad`, and a mask takes gradients without accumulating them.
"""

from collections.abc import Callable
from typing import Literal

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from sandmask.gradients import MaskReport
from sandmask.gradients import backward as backward_of
from sandmask.gradients._losses import Losses
from sandmask.gradients._merging import merge
from sandmask.gradients._params import Params
from sandmask.gradients._processes import Message, check_initialized
from sandmask.masks import GradientMoments, Mask

__all__ = ["backward", "merge_moments"]


def backward(
    losses: Losses,
    params: Params,
    mask: Mask,
    *,
    processes: Literal["merge", "average"] = "merge",
    group: dist.ProcessGroup | None = None,
    scaler: GradScaler | None = None,
    retain_graph: bool = False,
    check_finite: bool = True,
    on_report: Callable[[MaskReport], object] | None = None,
) -> MaskReport:
    """`sandmask.backward` over the environments of all processes; every process ends with the same `.grad`.

    All processes of the group must call it, with the same parameters and mask. An error or a gradient that
    is not finite in one of them is raised in all, so that none is left waiting.

    :param losses: the losses of this process's environments; an empty list where it has none.
    :param processes: "merge" if every process has environments of its own, "average" if every process has a
        part of each environment's data.
    :param group: the process group; the default one if not given.

    The other parameters are those of `sandmask.backward`.
    """
    check_initialized()
    return backward_of(
        losses,
        params,
        mask,
        processes=processes,
        group=group,
        scaler=scaler,
        retain_graph=retain_graph,
        check_finite=check_finite,
        on_report=on_report,
    )


def merge_moments(moments: GradientMoments, group: dist.ProcessGroup | None = None) -> GradientMoments:
    """Merge the moments of all processes of the group into each one's, in place; returns them.

    The formula of Chan et al., as sums over processes: the same numbers, to rounding, as one process gets
    that folds in all environments. A process without any environment passes empty moments,
    `mask.new_moments()`.
    """
    check_initialized()
    return merge(moments, group, Message("merge"), {})
