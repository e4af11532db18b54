"""Divide runs into stacks, and order the stacks. A `Cap` limits the size of stacks: see `Estimator.cap`.

Unfinished stacks of an interrupted sweep come first, with the runs of their checkpoints.
"""

import hashlib
import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sandmask._files import remove_abandoned
from sandmask.records import RunSpec
from sandmask.sweeps._folder import SweepFolder
from sandmask.training import split_checkpoint, stack_key
from sandmask.training.checkpoint import DamagedFileError, load_metadata
from sandmask.training.specs import trains_alone

Cap = Callable[[Sequence[RunSpec]], int]  # from runs that share a key to the most that one program may have
Arrange = Callable[[Sequence["PlannedStack"]], list["PlannedStack"]]
SLACK = 1.1  # largest time of the last worker to end, relative to the mean
MOST_CUTS = 256
STOPPED_SECONDS = 3600.0  # age at which the stop file of a killed program is removed


@dataclass(frozen=True)
class PlannedStack:
    """Runs that train as one program."""

    specs: tuple[RunSpec, ...]

    @property
    def id(self) -> str:
        """A short name, the same on every machine: a hash of the runs' ids in any order."""
        return stack_id(self.specs)


def stack_id(specs: Iterable[RunSpec]) -> str:
    """The name of the stack of these runs."""
    return hashlib.sha256(" ".join(sorted(spec.id for spec in specs)).encode()).hexdigest()[:16]


def group(specs: Iterable[RunSpec], cap: Cap) -> list[PlannedStack]:
    """Group runs into stacks, in the order of training.

    Runs with one held-out environment come first. They are in order of their trials, then draws, then datasets and
    algorithms, so that a sweep that is stopped early has trained about equally many draws of each method. Stacks that
    are larger than `cap` allows are cut into equal parts.

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
    """Runs of one key in as few stacks as `cap` allows; one run per stack for networks that train alone."""
    return equal_parts(members, 1 if trains_alone(members[0]) else max(1, cap(members)))


def equal_parts(specs: Sequence[RunSpec], limit: int) -> list[tuple[RunSpec, ...]]:
    """The fewest parts with at most `limit` runs each, of about equal size."""
    n_parts = -(-len(specs) // limit)
    bounds = [len(specs) * part // n_parts for part in range(n_parts + 1)]
    return [tuple(specs[start:stop]) for start, stop in pairwise(bounds)]


def _turn(spec: RunSpec) -> tuple[object, ...]:
    return (
        *(len(spec.test_envs), spec.trial_seed, spec.hparams_seed),
        *(spec.dataset, spec.algorithm, spec.test_envs, spec.id),
    )


def balanced(
    stacks: Sequence[PlannedStack], workers: int, cost: Callable[[RunSpec], float], fill: int = 1
) -> list[PlannedStack]:
    """Return stacks in the order in which several workers train them. The last ones are cut if workers would be idle.

    Among stacks of the last trial, those that take longest come first: few runs of a large network cannot fill a GPU,
    and should train beside other stacks instead of alone at the end. Earlier trials stay in the order of `group`, which
    compares the methods on the same draws if the sweep is stopped.

    :param stacks: stacks in the order of a single worker.
    :param workers: number of stacks that train at a time; with 1, nothing changes.
    :param cost: function that returns the approximate time of a run, in any unit.
    :param fill: number of runs that fill a device; fewer runs take as long.
    """
    if workers == 1 or not stacks:
        return list(stacks)

    def seconds(stack: PlannedStack) -> float:
        return max(len(stack.specs), fill) * cost(stack.specs[0])

    def trial(stack: PlannedStack) -> tuple[int, int]:
        return len(stack.specs[0].test_envs), stack.specs[0].trial_seed

    last_trial = max(map(trial, stacks))

    def place(stack: PlannedStack) -> tuple[float, ...]:
        return *trial(stack), -seconds(stack) if trial(stack) == last_trial else 0.0

    order = sorted(stacks, key=place)
    for _ in range(MOST_CUTS):
        ends, last = _simulate(order, workers, seconds)
        if max(ends) <= SLACK * sum(ends) / workers or len(last.specs) < 2 * fill or len(last.specs) == 1:
            break
        halves = [PlannedStack(part) for part in equal_parts(last.specs, -(-len(last.specs) // 2))]
        order = sorted([*(stack for stack in order if stack is not last), *halves], key=place)
    return order


def _simulate(
    order: Sequence[PlannedStack], workers: int, seconds: Callable[[PlannedStack], float]
) -> tuple[list[float], PlannedStack]:
    """The time at which each worker ends if free workers take the next stack, and the stack that ends last."""
    free = [0.0] * workers
    latest, last = -1.0, order[0]
    for stack in order:
        end = heapq.heappop(free) + seconds(stack)
        heapq.heappush(free, end)
        if end > latest:
            latest, last = end, stack
    return free, last


def unfinished_stacks(
    folder: SweepFolder, missing: Sequence[RunSpec], finished: set[str], cap: Cap, *, idle: bool = False
) -> list[PlannedStack]:
    """The stacks with checkpoints in the folder and missing runs.

    They continue without the runs that are finished, and in parts if `cap` is smaller now. A checkpoint that overlaps a
    larger one is the result of an interrupted split, and is removed. A checkpoint with other runs is left alone: it
    belongs to a stack that is training, or to an earlier sweep. Only metadata are read; the job that resumes verifies
    the tensors. Call it while holding the folder's turn.

    :param idle: no process trains in the folder, so damaged checkpoints are removed.
    """
    specs = {run.id: run for run in missing}
    found: list[PlannedStack] = []
    taken: set[str] = set()
    for path, ids in sorted(_checkpoints(folder, idle=idle), key=lambda item: (-len(item[1]), item[1])):
        if not set(ids) <= (finished | specs.keys()):
            continue
        wanted = [specs[run] for run in ids if run in specs and run not in taken]
        parts = capped(wanted, cap) if wanted else []
        split_or_remove(folder, path, parts)
        taken.update(ids)
        found += [PlannedStack(part) for part in parts]
    return found


def _checkpoints(folder: SweepFolder, *, idle: bool) -> list[tuple[Path, tuple[str, ...]]]:
    """Each checkpoint and its runs. If the folder is idle, damaged ones are removed, and their stacks start over."""
    found = []
    for path in folder.stacks.glob("[!.]*.checkpoint.safetensors"):
        try:
            found.append((path, tuple(load_metadata(path)["runs"])))
        except (DamagedFileError, KeyError):
            if idle:
                path.unlink(missing_ok=True)
    return found


def split_or_remove(folder: SweepFolder, checkpoint: Path, parts: Sequence[Sequence[RunSpec]]) -> None:
    """Replace the checkpoint of an unfinished stack, if there is one, by a checkpoint for each part.

    A damaged one is removed, and its runs start over. No other process may train these runs.
    """
    targets = [(part, folder.checkpoint(stack_id(part))) for part in parts]
    if [path for _, path in targets] == [checkpoint] or not checkpoint.exists():
        return
    if targets:
        with suppress(DamagedFileError):
            split_checkpoint(checkpoint, targets)
    checkpoint.unlink(missing_ok=True)


def remove_leftovers(folder: SweepFolder) -> None:
    """Remove files of killed processes. Call it while holding the turn, when no process trains."""
    remove_abandoned(folder.path)
    for pattern in (".*.tmp", "*.lock", "*.stop"):
        for path in folder.stacks.glob(pattern):
            with suppress(FileNotFoundError):  # another program removed it
                if pattern != "*.stop" or time.time() - path.stat().st_mtime > STOPPED_SECONDS:
                    path.unlink()
