from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sandmask.datasets import Dataset
from sandmask.records import RunRecord, RunSpec
from sandmask.training import Progress, split_checkpoint, train_stack

Specs = Callable[..., RunSpec]


@pytest.fixture
def specs(spec_of: Specs) -> list[RunSpec]:
    hparams = {"tau": 0.5, "dropout": 0.1}
    return [spec_of("SANDMask", (k % 3,), seed=k, trial_seed=k, hparams=hparams) for k in range(4)]


def interrupt_at(step: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.done == step:
            raise KeyboardInterrupt

    return report


def assert_equal(one: RunRecord, other: RunRecord) -> None:
    assert (one.spec, one.status, one.diverged_at) == (other.spec, other.status, other.diverged_at)
    np.testing.assert_array_equal(one.steps, other.steps)
    np.testing.assert_array_equal(one.accuracy_in, other.accuracy_in)
    np.testing.assert_array_equal(one.accuracy_out, other.accuracy_out)
    assert one.metrics.keys() == other.metrics.keys()
    for name, curve in one.metrics.items():
        np.testing.assert_array_equal(curve, other.metrics[name])


@pytest.mark.parametrize("stop_at", [1, 5, 6, 7, 11, 12])
def test_interrupted_and_resumed_gives_the_same_records(
    stop_at: int, specs: list[RunSpec], tmp_path: Path, dataset: Dataset, device: torch.device
) -> None:
    whole = train_stack(specs, dataset, device, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "parts", on_progress=interrupt_at(stop_at))
    parts = train_stack(specs, dataset, device, tmp_path / "parts")
    assert [run.status for run in whole] == ["done"] * 4
    assert whole[0].steps.tolist() == [0, 5, 10, 11]
    for one, other in zip(whole, parts, strict=True):
        assert_equal(one, other)


def test_a_checkpoint_splits_into_those_of_some_runs(
    specs: list[RunSpec], tmp_path: Path, dataset: Dataset, device: torch.device
) -> None:
    whole = {run.spec.id: run for run in train_stack(specs, dataset, device, tmp_path / "whole")}
    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "all", on_progress=interrupt_at(8))
    parts = [([specs[2], specs[0]], tmp_path / "a"), ([specs[1], specs[3]], tmp_path / "b")]
    split_checkpoint(tmp_path / "all", parts)
    done: list[int] = []
    for chosen, path in parts:
        for run in train_stack(chosen, dataset, device, path, on_progress=lambda progress: done.append(progress.done)):
            np.testing.assert_array_equal(run.accuracy_in, whole[run.spec.id].accuracy_in)
    assert min(done) == 9, "work was done again"
