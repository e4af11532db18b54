from collections.abc import Callable

import pytest
import torch

from sandmask.algorithms import State
from sandmask.datasets import Dataset, load_dataset
from sandmask.records import RunSpec
from sandmask.training import Stack
from sandmask.training.evaluation import _Part, different_columns, evaluation_steps

Specs = Callable[..., RunSpec]


@pytest.mark.parametrize("algorithm", ["ERM", "ARM"], ids=["alone", "in context"])
def test_an_evaluation_says_how_far_it_is(
    algorithm: str, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    stack = Stack([spec_of(algorithm)], dataset, device)
    told: list[tuple[int, int]] = []
    stack.evaluator.on_batch = lambda done, total: told.append((done, total))
    ((runs, (examples,)),) = stack.evaluator._parts
    stack.evaluator._parts = [_Part(runs, torch.split(examples, 50))]
    stack.tally(stack.init())
    done, totals = zip(*told, strict=True)
    assert len(told) > 2
    assert set(totals) == {len(dataset.labels)}
    assert list(done) == sorted(set(done))


def test_images_are_laid_out_for_the_cpu_and_the_counts_stay(spec_of: Specs, device: torch.device) -> None:
    images = load_dataset("Debug28")
    stack = Stack([spec_of(network="mnist-convnet")], images, device)
    state = stack.init()
    layouts = []

    def predict(_: State, x: torch.Tensor) -> torch.Tensor:
        layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        return stack.algorithm.predict({"params": state["params"][0]}, x.contiguous())[None]

    with torch.no_grad():
        expected = stack.evaluator.alone(predict, state)
    assert all(layouts)
    assert stack.tally(state).right.tolist() == expected.right.tolist()


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (1, 5), (12, 5), (11, 5), (7, 7), (8, 7), (3, 1)])
def test_steps_of_evaluations(steps: int, every: int) -> None:
    found = list(evaluation_steps(steps, every))
    assert found == [step for step in range(steps) if step % every == 0 or step == steps - 1]


def test_many_steps_with_few_evaluations_take_no_time() -> None:
    assert len(list(evaluation_steps(10**15, 10**14))) == 11


@pytest.mark.parametrize("rows", [1, 3, 32, 70])
def test_different_columns_are_those_of_torch(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    bits = torch.randint(2, (rows, 6), generator=generator, dtype=torch.uint8)
    bits = bits[:, torch.randint(6, (50,), generator=generator)]
    patterns, pattern_of = different_columns(bits)
    wanted = torch.unique(bits, dim=1, return_inverse=True)
    assert torch.equal(patterns, wanted[0])
    assert torch.equal(pattern_of, wanted[1])
