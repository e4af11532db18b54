"""The order and size of stacks with which several workers finish at about the same time."""

import heapq
from collections.abc import Callable, Sequence

from sandmask.records import RunSpec
from sandmask.sweeps._stacks import PlannedStack, equal_parts

Arrange = Callable[[Sequence[PlannedStack]], list[PlannedStack]]
SLACK = 1.1  # times the mean time of a worker, that the last one may take
MOST_CUTS = 256


def balanced(
    stacks: Sequence[PlannedStack], workers: int, cost: Callable[[RunSpec], float], fill: int = 1
) -> list[PlannedStack]:
    """Return stacks in the order of training by several workers, the last ones cut where workers would be idle.

    Among stacks of the same trial, those that take longest come first: few runs of a large network cannot fill a GPU,
    and should train beside other stacks instead of alone at the end.

    :param stacks: stacks in the order of a single worker.
    :param workers: stacks that train at a time; with 1, nothing changes.
    :param cost: about the time of a run, in any unit.
    :param fill: runs that fill a device: fewer take as long as these.
    """
    if workers == 1 or not stacks:
        return list(stacks)

    def seconds(stack: PlannedStack) -> float:
        return max(len(stack.specs), fill) * cost(stack.specs[0])

    def place(stack: PlannedStack) -> tuple[float, ...]:
        first = stack.specs[0]
        return len(first.test_envs), first.trial_seed, -seconds(stack)

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
    """When each worker ends if every free one takes the next stack, and the stack that ends last."""
    free = [0.0] * workers
    latest, last = -1.0, order[0]
    for stack in order:
        end = heapq.heappop(free) + seconds(stack)
        heapq.heappush(free, end)
        if end > latest:
            latest, last = end, stack
    return free, last
