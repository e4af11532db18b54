"""A worker on another machine than the driver's divides stacks by the memory that it finds there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sandmask._memory import usable_cores
from sandmask.datasets import load_dataset
from sandmask.records import RunRecord, RunSpec, read_runs
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, _job, expand
from sandmask.sweeps._cost import GUESSED_BYTES, SHARE, Rates, work_of
from sandmask.sweeps._job import Job, Outcome, run_job
from sandmask.training import train_stack

ALONE = JobOptions("", device="cpu", cores=1000)  # no other worker has room on the machine


@pytest.fixture
def runs(small_sweep: Callable[..., SweepSpec]) -> list[RunSpec]:
    return [run for run in expand(small_sweep(n_hparams=1, n_trials=3)).runs if run.algorithm == "ERM"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the stacks that are trained."""
    sizes: list[int] = []

    def watched(part: Sequence[RunSpec], *args: Any, **options: Any) -> list[RunRecord]:
        sizes.append(len(part))
        return train_stack(part, *args, **options)

    monkeypatch.setattr(_job, "train_stack", watched)
    return sizes


def set_free_runs(monkeypatch: pytest.MonkeyPatch, count: float, run: RunSpec) -> None:
    """Free memory for so many runs, by the guess of what a run takes."""
    free = count * GUESSED_BYTES * work_of(run, load_dataset("DebugVector")).numbers / SHARE
    monkeypatch.setattr(_job, "available_memory", lambda _: free)


def train(folder: SweepFolder, runs: Sequence[RunSpec], options: JobOptions) -> Outcome:
    return run_job(Job("DebugVector", tuple(run.to_json() for run in runs), replace(options, folder=str(folder.path))))


@pytest.mark.parametrize(
    ("free", "options", "sizes"),
    [
        (100, ALONE, [9]),
        (3.5, replace(ALONE, calibrate=False), [3, 3, 3]),
        (5.5, replace(ALONE, calibrate=False), [4, 5]),
        (0.1, replace(ALONE, calibrate=False), [1] * 9),
        (3.5, replace(ALONE, cores=None), [9]),  # the driver has seen to it
    ],
)
def test_stacks_are_divided_by_the_workers_own_memory(
    folder: SweepFolder,
    runs: list[RunSpec],
    trained: list[int],
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    options: JobOptions,
    sizes: list[int],
) -> None:
    set_free_runs(monkeypatch, free, runs[0])
    assert len(runs) == 9
    assert train(folder, runs, options).state == "done"
    assert trained == sizes
    assert {run.spec.id for run in read_runs(folder.path)} == {run.id for run in runs}


def test_memory_is_shared_with_the_workers_that_the_machine_has_cores_for(
    folder: SweepFolder, runs: list[RunSpec], trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_job, "usable_cores", lambda: 8)
    set_free_runs(monkeypatch, 6.5, runs[0])
    train(folder, runs[:6], replace(ALONE, cores=4, calibrate=False))
    assert trained == [3, 3]
    trained.clear()
    train(folder, runs[6:], replace(ALONE, cores=1, workers=2, calibrate=False))  # two at most, of eight
    assert trained == [3]
    assert usable_cores() >= 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_measures_where_a_guess_does_not_fit(
    folder: SweepFolder, runs: list[RunSpec], trained: list[int], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    measured: list[RunSpec] = []

    def calibrate(spec: RunSpec, *_: object, **__: object) -> Rates:
        measured.append(spec)
        if fails:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return Rates(step_seconds=0.0, seconds=0.0, bytes=GUESSED_BYTES / 2)

    monkeypatch.setattr(_job, "calibrate", calibrate)
    set_free_runs(monkeypatch, 3.25, runs[0])
    train(folder, runs, ALONE)
    assert trained == ([3, 3, 3] if fails else [4, 5])
    assert measured == [runs[0]]
