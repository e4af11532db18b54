"""What holds for every executor: it is one of `concurrent.futures`, and a sweep comes out the same."""

import operator
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, read_runs
from sandmask.records.testing import assert_same_runs
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, expand, normalized, run_sweep
from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions, InlineExecutor

# One start a kind: processes that import torch take seconds. Ray's own sweep is tests/e2e/test_sweep_on_ray.py.
KINDS = {
    "this process": ("local", ExecutorOptions()),
    "worker processes": ("local", ExecutorOptions(workers=2, devices=("cpu",))),
    "submitit's local executor": ("slurm", ExecutorOptions(cluster="local")),
}


@pytest.fixture(params=list(KINDS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Executor]:
    name, options = KINDS[request.param]
    with_logs = ExecutorOptions(
        options.workers, options.devices, cluster=options.cluster, log_folder=str(tmp_path / "log")
    )
    return lambda: EXECUTORS[name].build(with_logs)


@pytest.fixture(scope="module")
def sweep() -> SweepSpec:
    fields = {"n_hparams": 1, "n_trials": 1, "steps": 6, "checkpoint_every": 2}
    hparams = {"mlp_width": 8, "batch_size": 8, "tau": 0.3}
    return normalized(SweepSpec(("DebugVector",), ("ERM", "SANDMask"), hparams=hparams, **fields))  # type: ignore[arg-type]


def train(sweep: SweepSpec, path: Path, make: Callable[[], Executor]) -> list[RunRecord]:
    folder = SweepFolder(path)
    folder.accept(sweep)
    result = run_sweep(folder, expand(sweep), JobOptions(str(path), device="cpu"), make, lambda _: 3)
    assert result.failed == {}
    return read_runs(path)


@pytest.fixture(scope="module")
def alone(sweep: SweepSpec, tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    return train(sweep, tmp_path_factory.mktemp("alone"), InlineExecutor)


def test_errors_come_back_and_a_sweep_is_the_same(
    make: Callable[[], Executor], sweep: SweepSpec, alone: list[RunRecord], tmp_path: Path
) -> None:
    executor = make()  # one for both: a start takes seconds
    bad = executor.submit(operator.truediv, 1, 0)
    with pytest.raises(Exception, match="division by zero"):  # wrapped, perhaps, but it says what it was
        bad.result()
    runs = train(sweep, tmp_path / "sweep", lambda: executor)
    assert_same_runs(runs, alone)


def test_entries_say_what_they_are() -> None:
    assert list(EXECUTORS) == ["local", "ray", "slurm"]
    assert all(len(entry.description) > 10 for entry in EXECUTORS.values())


def test_slurm_gives_whole_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no srun
    with pytest.raises(SandmaskError, match="Slurm assigns only whole GPUs"):
        EXECUTORS["slurm"].build(ExecutorOptions(gpus_per_worker=0.5, log_folder=str(tmp_path)))
    with pytest.raises(SandmaskError, match="Slurm cannot be used here"):
        EXECUTORS["slurm"].build(ExecutorOptions(log_folder=str(tmp_path)))
