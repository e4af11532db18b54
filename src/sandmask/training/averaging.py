"""Averages of a run's weights while it trains: SMA, EMA and SWAD.

An average does not change the training. One run gives the accuracies of its current weights and of every average.
All functions take tensors of K runs, with K as the first dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._physical import has_kernels
from sandmask.algorithms import Hparams, State
from sandmask.records import AVERAGES
from sandmask.registry import check_known

SMA_START = 100.0  # number of first iterates that the uniform mean leaves out (Arpit et al., 2022)
EMA_DECAY = 0.999
SWAD_CONVERGE, SWAD_TOLERANCE = 3, 6  # evaluations (Cha et al., 2021)
SWAD_RATIO = 0.3
AT_ONCE = 2  # iterates per update of the averages; on a GPU, two iterates halve the passes over memory

Average = dict[str, Any]  # tensors [K, ...]; the tensors under "weights" have the shapes of the state's entries


def average_metric(name: str) -> str:
    """The name of the metric with the accuracies of an average, a vector: see `average_metrics`."""
    return f"average/{name}"


def parse_averages(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of averages and return them in the order of `AVERAGES`.

    :param names: any of "sma", "ema" and "swad".
    """
    for name in names:
        check_known("average", name, AVERAGES)
    return tuple(name for name in AVERAGES if name in names)


def start_averages(names: Sequence[str], state: State, entries: Sequence[str]) -> dict[str, Average]:
    """The averages before the first step, of these entries of a state."""
    weights = {entry: state[entry] for entry in entries}
    return {name: _start_swad(weights) if name == "swad" else {"weights": _copy(weights)} for name in names}


def step_averages(averages: dict[str, Average], iterates: Sequence[State], hparams: Hparams) -> dict[str, Average]:
    """Update the averages with the states after several consecutive steps.

    A state may have the learning rate of its step as "rate". If the rate is 0, training has ended, and SMA and EMA do
    not change.
    """
    if not averages or not iterates:
        return averages
    done = torch.stack([state["step"] for state in iterates]).to(torch.float32)
    shares = torch.stack([_shares(name, average, done, hparams) for name, average in averages.items()])
    if "rate" in iterates[0]:
        trains = torch.stack([state["rate"] > 0 for state in iterates])
        for number, name in enumerate(averages):
            shares[number] *= trains | (name == "swad")
    means = [average["segment" if name == "swad" else "weights"] for name, average in averages.items()]
    moved = {entry: follow([mean[entry] for mean in means], [s[entry] for s in iterates], shares) for entry in means[0]}
    stepped = {}
    for number, (name, average) in enumerate(averages.items()):
        mean = {entry: of_averages[number] for entry, of_averages in moved.items()}
        if name == "swad":
            stepped[name] = {**average, "length": average["length"] + float(len(iterates)), "segment": mean}
        else:
            stepped[name] = {"weights": mean}
    return stepped


def _shares(name: str, average: Average, done: Tensor, hparams: Hparams) -> Tensor:
    """The weight of each iterate in an average, [iterates, K] like `done`; 1 replaces the average."""
    if name == "swad":
        numbers = torch.arange(1, len(done) + 1, dtype=done.dtype, device=done.device)
        length: Tensor = average["length"]
        return 1.0 / (length + numbers.unsqueeze(1))
    if name == "sma":
        return 1.0 / (done - hparams.get("sma_start", SMA_START)).clamp(min=1.0)
    # EMA is a uniform mean at first. Otherwise, the first iterates would have too much weight.
    decay = hparams.get("ema_decay", torch.full_like(done, EMA_DECAY))
    return torch.maximum(1.0 - decay, 1.0 / done.clamp(min=1.0))


def follow(means: Sequence[Tensor], iterates: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Move means [K, ...] towards each iterate [K, ...] in turn; on a GPU with one kernel.

    `shares` are [means, iterates, K]: 0 keeps a mean, and 1 replaces it by the iterate.
    """
    if has_kernels(means[0]):
        from sandmask.functional.kernels import running_means

        return running_means.follow(means, iterates, shares)
    return plain_follow(means, iterates, shares)


def plain_follow(means: Sequence[Tensor], iterates: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """`follow` with torch's operations."""
    followed = list(means)
    for iterate, of_means in zip(iterates, shares.unbind(1), strict=True):
        followed = [
            torch.lerp(mean, iterate, column(share, mean)) for mean, share in zip(followed, of_means, strict=True)
        ]
    return followed


def _start_swad(weights: dict[str, Tensor]) -> Average:
    first = next(iter(weights.values()))
    zeros = torch.zeros(len(first), device=first.device)
    return {
        "segment": _copy(weights),  # the mean of the iterates since the last evaluation, and their number
        "length": zeros,
        "recent": {entry: torch.stack([vector] * SWAD_CONVERGE, 1) for entry, vector in weights.items()},
        "losses": torch.full((*zeros.shape, SWAD_CONVERGE), torch.inf, device=zeros.device),
        "weights": _copy(weights),  # the mean of the segments from the start to the last good one, and their number
        "segments": zeros.clone(),
        "pending": _copy(weights),  # the mean of the segments above the threshold since then, and their number
        "waiting": zeros.clone(),
        "threshold": torch.full_like(zeros, -torch.inf),  # -inf before the start
        "ended": zeros.clone(),
    }


def evaluate_swad(average: Average, loss: Tensor, hparams: Hparams) -> Average:
    """Update SWAD's average at an evaluation with the validation loss [K] of the current iterate.

    A segment consists of the iterates between two evaluations. The average starts with the first segment whose loss is
    the lowest of `SWAD_CONVERGE` consecutive segments, itself included. The threshold is (1 + ratio) times the mean of
    these losses. The average ends once `SWAD_TOLERANCE` consecutive segments are above the threshold, with the last
    segment before them. This is Algorithm 1 of the paper; the released code begins and counts differently. If training
    ends sooner, the last segments above the threshold are left out, as in the released code and unlike Algorithm 1. A
    second evaluation of the same iterates changes nothing.
    """
    segment, entries = average["segment"], list(average["segment"])
    recent = {e: torch.cat([average["recent"][e][:, 1:], segment[e].unsqueeze(1)], 1) for e in entries}
    losses = torch.cat([average["losses"][:, 1:], loss.unsqueeze(1)], 1)
    started = average["segments"] > 0
    starts = ~started & torch.isfinite(losses).all(1) & (losses[:, 0] <= losses.min(1).values)
    ratio = hparams.get("swad_ratio", torch.full_like(loss, SWAD_RATIO))
    threshold = torch.where(starts, (1.0 + ratio) * losses.mean(1), average["threshold"])
    ended = average["ended"] > 0
    good = started & ~ended & (loss <= threshold)
    bad = started & ~ended & ~good
    waiting = average["waiting"] + bad
    total = average["segments"] + torch.where(good, average["waiting"] + 1.0, 0.0)
    # A good segment also adds the pending ones.
    share = torch.stack([average["segments"], average["waiting"], torch.ones_like(loss)], 0) / total.clamp(min=1.0)
    weights, pending = {}, {}
    for e in entries:
        new, old, late = segment[e], average["weights"][e], average["pending"][e]
        pending[e] = where(bad, late + column((1.0 / waiting.clamp(min=1.0)), new) * (new - late), late)
        joined = column(share[0], old) * old + column(share[1], old) * late + column(share[2], old) * new
        weights[e] = where(starts, recent[e].mean(1), where(good, joined, old))
    found = {
        "segment": segment,
        "length": torch.zeros_like(average["length"]),
        "recent": recent,
        "losses": losses,
        "weights": weights,
        "segments": torch.where(starts, float(SWAD_CONVERGE), total),
        "pending": pending,
        "waiting": torch.where(good, 0.0, waiting),
        "threshold": threshold,
        "ended": torch.where(bad & (waiting >= SWAD_TOLERANCE), 1.0, average["ended"]),
    }
    is_new = average["length"] > 0  # 0 if a run was interrupted after this evaluation and repeats it
    evaluated: Average = pytree.tree_map(lambda new, old: where(is_new, new, old), found, average)
    return evaluated


def averaged_state(state: State, average: Average) -> State:
    """The state for predictions with an average. Where SWAD's average has not started, it is the last segment."""
    weights = average["weights"]
    if "segments" in average:
        started = average["segments"] > 0
        weights = {entry: where(started, mean, average["segment"][entry]) for entry, mean in weights.items()}
    return {**state, **weights}


def column(values: Tensor, like: Tensor) -> Tensor:
    """Values [K], reshaped to broadcast against a tensor [K, ...]."""
    return values.view(-1, *[1] * (like.ndim - 1))


def where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`torch.where` for the rows of tensors [K, ...], with a condition [K]."""
    return torch.where(column(condition, yes), yes, no)


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {entry: vector.clone() for entry, vector in weights.items()}
