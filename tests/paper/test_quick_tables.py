"""Tiny sweeps: marked, spread over the data, and never with a mask that trains nothing."""

import itertools
from dataclasses import replace
from pathlib import Path

import torch

from sandmask.datasets import TensorDataset, load_dataset
from sandmask.paper import _train as quick


def test_examples_are_spread_over_each_environment() -> None:
    labels = torch.arange(10).repeat_interleave(7)  # sorted by class, as folders of images are
    parts = [(torch.rand(70, 3), labels), (torch.rand(5, 3), labels[:5])]
    dataset = TensorDataset("X", ("a", "b"), tuple(map(str, range(10))), parts)
    some = quick.some_examples(dataset, 10)
    assert some.bounds == (0, 10, 15)
    assert set(some.labels[:10].tolist()) == set(range(10))
    torch.testing.assert_close(some.inputs(torch.arange(10, 15)), parts[1][0])


def test_specs_are_marked_and_masks_let_something_through() -> None:
    for sweep in (quick.SPIRALS, *quick.MNIST, quick.PACS):
        specs = sweep.specs()
        assert all(spec.options == {"examples": sweep.examples} for spec in specs)
        assert all(spec.hparams.get("tau", 0.0) < 1 for spec in specs)
        assert len({spec.id for spec in specs}) == len(specs)
        counts = (sweep.algorithms, sweep.test_envs, range(sweep.trials), range(sweep.draws))
        assert len(specs) == len(list(itertools.product(*counts)))


def test_two_sweeps_train_into_records(tmp_path: Path) -> None:
    tiny = replace(quick.SPIRALS, algorithms=("ERM",), test_envs=(3,), steps=4, examples=30, trials=1)
    told: list[tuple[int, int]] = []
    records = quick.run_tiny(
        [tiny], torch.device("cpu"), tmp_path, lambda what, done, total: told.append((done, total))
    )
    assert [run.status for run in records] == ["done", "done"]
    assert [run.steps.tolist() for run in records] == [[0, 1, 2, 3]] * 2
    assert (told[0], told[-1]) == ((0, 8), (8, 8))
    assert load_dataset("Spirals").bounds[1] == 2000  # the dataset itself is whole
