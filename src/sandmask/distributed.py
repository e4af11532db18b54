"""Environments in several processes: moments are merged with all-reduce before the mask is applied.

Each process holds the same model, computes the losses of its own environments, and calls

    sandmask.distributed.backward(losses_of_this_process, model.named_parameters(), mask)

after which `.grad` is the same in every process, and equal to what one process with all environments
computes. Processes may have different numbers of environments, even none, as long as there are at least two
in total. Counts, sums of signs, means and sums of squared deviations can be added up over processes exactly.
One all-reduce adds up signs and means, and a second one squared deviations; large models take several of each.

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
from sandmask.gradients._checks import Params
from sandmask.gradients._losses import Losses
from sandmask.gradients._processes import Message, check_initialized, merge
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
    """Apply `sandmask.backward` to the environments of all processes; all end with the same `.grad`.

    All processes of the group must call it, with the same parameters and mask. An error or a gradient that is not
    finite in one of them is raised in all, so that none is left waiting.

    :param losses: losses of this process's environments; an empty list if it has none.
    :param params: parameters, or `model.named_parameters()`.
    :param mask: for example `SANDMask(tau=0.8)`.
    :param processes: "merge" if every process has environments of its own, "average" if every process has a part of
        each environment's data.
    :param group: process group; the default one if not given.
    :param scaler: `GradScaler` of mixed-precision training, as in `sandmask.backward`.
    :param retain_graph: keep the losses' graphs for another backward pass.
    :param check_finite: raise an error if a gradient is inf or NaN.
    :param on_report: called with the report once `.grad` is written.
    :return: a report of what the mask did.
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
    """Merge the moments of all processes of the group, in place.

    The result equals, up to rounding, the moments of one process with all environments (the formula of Chan et al.). A
    process without environments passes empty moments, `mask.new_moments()`.

    :param moments: moments of this process's environments.
    :param group: process group; the default one if not given.
    :return: the same object, with the merged moments.
    """
    check_initialized()
    return merge(moments, group, Message("merge"), {})
