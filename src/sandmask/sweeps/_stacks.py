"""Which runs train together, and in which order. How many at most, the `Cap` says: see `Estimator.cap`."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sandmask.records import RunSpec
from sandmask.training import stack_key
from sandmask.training.specs import trains_alone

Cap = Callable[[Sequence[RunSpec]], int]  # the most runs of these (they share a key) that one program may have


@dataclass(frozen=True)
class PlannedStack:
    """Runs that train as one program."""

    specs: tuple[RunSpec, ...]

    @property
    def id(self) -> str:
        """A short name, the same on every machine: a hash of the runs' ids in any order."""
        return stack_id([spec.id for spec in self.specs])


def stack_id(run_ids: Iterable[str]) -> str:
    """The name of the stack of these runs."""
    return hashlib.sha256(" ".join(sorted(run_ids)).encode()).hexdigest()[:16]


def group(specs: Iterable[RunSpec], cap: Cap) -> list[PlannedStack]:
    """Group runs into stacks, in the order of training.

    Runs with one held-out environment come first, then trial by trial, and within a trial draw by draw, every dataset
    and algorithm in turn, so that a sweep that is stopped early has compared its methods on about equally many draws.
    Stacks that are larger than `cap` allows are cut into equal parts.

    :param specs: specs of the runs.
    :param cap: function of the specs of a stack that returns its largest size.
    """
    together: defaultdict[tuple[object, ...], list[RunSpec]] = defaultdict(list)
    for spec in sorted(specs, key=_turn):
        together[stack_key(spec)].append(spec)
    stacks = []
    for members in together.values():
        stacks += [PlannedStack(part) for part in capped(members, cap)]
    return sorted(stacks, key=lambda stack: _turn(stack.specs[0]))


def capped(members: Sequence[RunSpec], cap: Cap) -> list[tuple[RunSpec, ...]]:
    """Runs of one key in as few stacks as `cap` allows; each by itself where its network fills the machine."""
    return equal_parts(members, 1 if trains_alone(members[0]) else max(1, cap(members)))


def equal_parts(specs: Sequence[RunSpec], limit: int) -> list[tuple[RunSpec, ...]]:
    """The fewest parts with at most `limit` runs each, as equal as they can be."""
    n_parts = -(-len(specs) // limit)
    bounds = [len(specs) * part // n_parts for part in range(n_parts + 1)]
    return [tuple(specs[start:stop]) for start, stop in pairwise(bounds)]


def _turn(spec: RunSpec) -> tuple[object, ...]:
    return (
        *(len(spec.test_envs), spec.trial_seed, spec.hparams_seed),
        *(spec.dataset, spec.algorithm, spec.test_envs, spec.id),
    )
