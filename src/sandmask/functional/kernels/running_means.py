"""A GPU kernel for averages of iterates of K runs. The equivalent in torch is `training.averaging.plain_follow`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _towards(mean, iterate, share):
    """The same computation as `torch.lerp`."""
    way = iterate - mean
    return tl.where(share < 0.5, mean + share * way, iterate - way * (1.0 - share))


@triton.jit
def _follow_kernel(
    mean,
    new_mean,
    shares,
    first,
    second,
    place,
    inside,
    run,
    n_runs,
    pair: tl.constexpr,
):
    """Update one mean with one or two iterates."""
    value = _towards(tl.load(mean + place, mask=inside), first, tl.load(shares + run))
    if pair:
        value = _towards(value, second, tl.load(shares + n_runs + run))
    tl.store(new_mean + place, value, mask=inside)


@triton.jit
def _follow_all_kernel(
    mean_0,
    mean_1,
    mean_2,
    new_0,
    new_1,
    new_2,
    iterate_0,
    iterate_1,
    shares,
    numel,
    n_runs,
    n_means: tl.constexpr,
    pair: tl.constexpr,
    block: tl.constexpr,
):
    run = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < numel
    place = run * numel + place
    first = tl.load(iterate_0 + place, mask=inside)
    second = first
    if pair:
        second = tl.load(iterate_1 + place, mask=inside)
    own: tl.constexpr = 2 if pair else 1  # shares of each mean
    _follow_kernel(mean_0, new_0, shares, first, second, place, inside, run, n_runs, pair)
    if n_means > 1:
        shares += own * n_runs
        _follow_kernel(mean_1, new_1, shares, first, second, place, inside, run, n_runs, pair)
    if n_means > 2:
        shares += own * n_runs
        _follow_kernel(mean_2, new_2, shares, first, second, place, inside, run, n_runs, pair)


def follow(means: Sequence[Tensor], iterates: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """See `training.averaging.follow`. Up to three means and two iterates need one pass, which reads iterates once."""
    if len(means) > 3:
        return follow(means[:3], iterates, shares[:3]) + follow(means[3:], iterates, shares[3:])
    if len(iterates) > 2:
        return follow(follow(means, iterates[:2], shares[:, :2]), iterates[2:], shares[:, 2:])
    n_runs, numel = len(means[0]), means[0][0].numel()
    outs = [torch.empty(mean.shape, device=mean.device) for mean in means]
    launch: Any = _follow_all_kernel[(triton.cdiv(numel, BLOCK), n_runs)]
    olds, news = ([*tensors, *[tensors[0]] * (3 - len(tensors))] for tensors in ([m.contiguous() for m in means], outs))
    ends = [iterates[0].contiguous(), iterates[-1].contiguous()]
    sizes = {"n_means": len(means), "pair": len(iterates) == 2, "block": BLOCK}
    launch(*olds, *news, *ends, shares.float().contiguous(), numel, n_runs, **sizes)
    return outs
