"""The order and size of stacks for several workers."""

from itertools import pairwise

import pytest

from sandmask.datasets import DATASETS
from sandmask.records import RunSpec
from sandmask.sweeps._stacks import PlannedStack, balanced
from sandmask.training import make_spec

WIDTHS = {8: 1.0, 64: 10.0, 512: 100.0}


def stack_of(width: int, count: int, trial: int = 0) -> PlannedStack:
    entry, hparams = DATASETS["DebugVector"], {"mlp_width": width}
    return PlannedStack(
        tuple(make_spec(entry, "ERM", [0], hparams=hparams, seed=seed, trial_seed=trial) for seed in range(count))
    )


def cost(spec: RunSpec) -> float:
    return WIDTHS[int(spec.hparams["mlp_width"])]


def shapes(stacks: list[PlannedStack]) -> list[tuple[int, int]]:
    return [(int(stack.specs[0].hparams["mlp_width"]), len(stack.specs)) for stack in stacks]


def test_one_worker_keeps_the_order() -> None:
    stacks = [stack_of(8, 4), stack_of(512, 1)]
    assert balanced(stacks, 1, cost) == stacks
    assert balanced([], 2, cost) == []


def test_what_takes_longest_comes_first_in_the_last_trial() -> None:
    stacks = [stack_of(8, 3), stack_of(64, 20), stack_of(512, 1)]
    order = balanced(stacks, 2, cost, fill=16)
    assert shapes(order)[0] == (512, 1)  # alone it takes as long as 16, longer than 20 of a tenth of the size


def test_earlier_trials_are_trained_draw_by_draw() -> None:
    first = [stack_of(8, 3), stack_of(64, 20), stack_of(512, 1)]
    order = balanced([*first, stack_of(8, 2, trial=1), stack_of(512, 2, trial=1)], 2, cost, fill=16)
    assert order[:3] == first
    assert shapes(order[3:]) == [(512, 2), (8, 2)]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_large_stacks_at_the_end_are_cut_until_all_workers_have_work(workers: int) -> None:
    stacks = [stack_of(64, 64), stack_of(8, 5)]
    order = balanced(stacks, workers, cost)
    assert sum(len(stack.specs) for stack in order) == 69
    assert {spec.id for stack in order for spec in stack.specs} == {spec.id for stack in stacks for spec in stack.specs}
    busy = [0.0] * workers
    for stack in order:
        busy[busy.index(min(busy))] += len(stack.specs) * cost(stack.specs[0])
    assert max(busy) <= 1.1 * sum(busy) / workers
    times = [len(stack.specs) * cost(stack.specs[0]) for stack in order]
    assert all(one >= other for one, other in pairwise(times))


def test_stacks_that_do_not_fill_a_gpu_stay_whole() -> None:
    assert shapes(balanced([stack_of(64, 20)], 4, cost, fill=16)) == [(64, 20)]
    assert shapes(balanced([stack_of(64, 1)], 4, cost)) == [(64, 1)]
