"""Sweeps with a time limit: what does not fit is left for the next call, and what is cut off goes on from its step."""

import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.records import RunSpec
from sandmask.sweeps import JobOptions, SweepFolder, SweepResult, SweepSpec, _progress, expand, run_sweep
from sandmask.sweeps import _job as job_module
from sandmask.sweeps._job import Job, _work_left
from sandmask.sweeps._progress import MARGIN, ProgressWriter, expected_seconds
from sandmask.sweeps.executors import InlineExecutor
from sandmask.training import train_stack
from sandmask.training.checkpoint import save_tree

Make = Callable[..., SweepSpec]


def go(
    folder: SweepFolder,
    sweep: SweepSpec,
    ends: float | None,
    executor: Callable[[], Executor] = InlineExecutor,
    work: Callable[[RunSpec], float] = lambda _: 1.0,
) -> SweepResult:
    folder.accept(sweep)
    options = JobOptions(str(folder.path), device="cpu", ends=ends)
    return run_sweep(folder, expand(sweep), options, executor, lambda _: 1, work=work)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes when a test says so."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def names(folder: SweepFolder, sweep: SweepSpec) -> list[str]:
    return sorted(run.algorithm for run in expand(sweep).runs if run.id in folder.finished())


def test_what_does_not_fit_is_left_and_shorter_stacks_train(folder: SweepFolder, small_sweep: Make) -> None:
    sweep = small_sweep(test_envs=("0",))
    result = go(folder, sweep, time.time() + 600, work=lambda run: 1e9 if run.algorithm == "SANDMask" else 1.0)
    assert (result.done, result.left, result.failed) == (2, 2, {})
    assert names(folder, sweep) == ["ERM", "ERM"]
    result = go(folder, sweep, None)
    assert (result.done, result.left) == (4, 0)


def test_the_first_stacks_start_without_an_estimate(folder: SweepFolder, small_sweep: Make) -> None:
    result = go(folder, small_sweep(test_envs=("0",)), time.time() + 600, work=lambda _: 1e9)
    assert (result.done, result.left) == (4, 0)
    result = go(folder, small_sweep(n_hparams=3, test_envs=("0",)), time.time() + 600, work=lambda _: 0.0)  # not known
    assert (result.done, result.left) == (6, 0)


def test_a_stack_is_cut_off_with_a_checkpoint(
    folder: SweepFolder, small_sweep: Make, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, began = small_sweep(test_envs=("0",)), []
    ends = clock[0] + 600

    def train(*args: Any, on_progress: Any, **options: Any) -> Any:
        def watching(progress: Any) -> None:
            began.append(progress.done)
            if progress.done >= 4:
                clock[0] = ends
            on_progress(progress)

        return train_stack(*args, on_progress=watching, **options)

    monkeypatch.setattr(job_module, "train_stack", train)
    monkeypatch.setattr(_progress, "WRITE_SECONDS", -1.0)
    result = go(folder, sweep, ends)
    assert (result.done, result.left, result.failed) == (0, 4, {})
    (checkpoint,) = folder.stacks.glob("*.checkpoint.safetensors")
    assert not list(folder.stacks.glob("*.lock"))
    began.clear()
    assert go(folder, sweep, None).done == 4
    assert began[0] >= 4
    assert not checkpoint.exists()


class Waiting(Executor):
    """Never starts a job. When it has four, an hour passes."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.cancelled = clock, False
        self.jobs: list[tuple[Future[Any], Job]] = []

    def submit(self, _: Any, job: Job) -> Future[Any]:  # type: ignore[override]
        self.jobs.append((Future(), job))
        self.clock[0] += 3600 * (len(self.jobs) == 4)
        return self.jobs[-1][0]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.cancelled = cancel_futures


def test_jobs_that_wait_for_a_machine_are_withdrawn(folder: SweepFolder, small_sweep: Make, clock: list[float]) -> None:
    executor = Waiting(clock)
    result = go(folder, small_sweep(test_envs=("0",)), clock[0] + 600, lambda: executor)
    assert (result.done, result.left) == (0, 4)
    assert executor.cancelled
    assert go(folder, small_sweep(test_envs=("0",)), clock[0] - 1).left == 4


def test_the_time_of_a_stack_is_that_of_its_algorithm_in_this_session(folder: SweepFolder, small_sweep: Make) -> None:
    folder.stacks.mkdir(parents=True)
    erm, _, sand, _ = expand(small_sweep(test_envs=("0",))).runs

    def done(name: str, spec: RunSpec, session: str, work: float, seconds: float, state: str = "done") -> None:
        progress = ProgressWriter(folder, name, [spec], device="cpu", stop=lambda: False, session=session, work=work)
        progress._began -= seconds
        progress.write(state, done=7)

    assert expected_seconds(folder, "now", erm, 5.0) is None
    done("0", erm, "before", 1.0, 1000.0)
    done("1", erm, "now", 1.0, 1000.0, "running")
    assert expected_seconds(folder, "now", erm, 5.0) is None
    done("2", sand, "now", 2.0, 20.0)
    assert expected_seconds(folder, "now", erm, 5.0) == pytest.approx(MARGIN * 50, rel=0.01)
    done("3", erm, "now", 2.0, 200.0)
    done("4", erm, "now", 6.0, 200.0)
    assert expected_seconds(folder, "now", erm, 5.0) == pytest.approx(MARGIN * 250, rel=0.01)
    assert expected_seconds(folder, "now", sand, 5.0) == pytest.approx(MARGIN * 50, rel=0.01)


def test_only_the_steps_after_the_checkpoint_count(folder: SweepFolder, small_sweep: Make, tmp_path: Path) -> None:
    job = Job("", (), JobOptions(str(folder.path)), work=8.0)
    path = tmp_path / "checkpoint.safetensors"
    assert _work_left(job, path, 4) == 8.0
    save_tree(path, {"params": torch.zeros(2)}, {"done": 3})
    assert _work_left(job, path, 4) == 2.0
    path.write_bytes(b"damaged")
    assert _work_left(job, path, 4) == 8.0
    for damaged in ("3x", None):
        save_tree(path, {"params": torch.zeros(2)}, {"done": damaged})
        assert _work_left(job, path, 4) == 8.0


def test_the_command_says_how_far_it_came(tmp_path: Path) -> None:
    command = ["sweep", "run", str(tmp_path / "sweep"), "--datasets", "DebugVector", "--algorithms", "ERM"]
    command += ["--n-hparams", "1", "--n-trials", "1", "--steps", "3", "--device", "cpu", "--workers", "1"]
    done = CliRunner().invoke(app, [*command, "--time-limit", "0"])
    assert done.exit_code == 0, done.output
    assert "0/3 runs done within the time limit. Rerun the same command to continue." in done.output
    done = CliRunner().invoke(app, [*command, "--time-limit", "600"])
    assert "3/3 runs done." in done.output
    done = CliRunner().invoke(app, [*command, "--n-hparams", "2", "--time-limit", "0", "--json"])
    summary = json.loads(done.stdout)
    assert (summary["runs"], summary["done"], summary["left"]) == (6, 3, 3)


class Late(Waiting):
    """Ends its jobs when it is shut down, as workers do that save after the time limit."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future, job in self.jobs[:2]:
            options = replace(job.options, folder=str(Path(job.options.folder).parent / "other disk"), ends=None)
            future.set_result(job_module.run_job(replace(job, options=replace(options, carry=True))))
        first, message = self.jobs[2][1], "something is wrong"
        ids = tuple(RunSpec.from_json(spec).id for spec in first.specs)
        self.jobs[2][0].set_result(job_module.Outcome("failed", "stack", ids, message))
        for future, _ in self.jobs[3:]:
            future.cancel()


def test_what_ends_while_workers_stop_is_not_lost(folder: SweepFolder, small_sweep: Make, clock: list[float]) -> None:
    result = go(folder, small_sweep(test_envs=("0",)), clock[0] + 600, lambda: Late(clock))
    assert (result.done, result.left, list(result.failed.values())) == (2, 1, ["something is wrong"])
    assert len(folder.finished()) == 2


@pytest.mark.parametrize("ends", [1e10, 1e300, math.inf])
def test_a_time_limit_may_be_far_away(folder: SweepFolder, small_sweep: Make, ends: float) -> None:
    class Background(InlineExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            threading.Timer(0.1, lambda: future.set_result(fn(*args, **kwargs))).start()
            return future

    assert go(folder, small_sweep(test_envs=("0",), n_hparams=1), time.time() + ends, Background).left == 0


def test_a_machine_whose_clock_is_ahead_is_not_given_the_stack_again(
    folder: SweepFolder, small_sweep: Make, clock: list[float]
) -> None:
    class Ahead(InlineExecutor):
        submitted = 0

        def submit(self, fn: Any, /, job: Any) -> Future[Any]:  # type: ignore[override]
            Ahead.submitted += 1
            return super().submit(fn, replace(job, options=replace(job.options, ends=clock[0] - 1)))

    result = go(folder, small_sweep(test_envs=("0",)), clock[0] + 3, Ahead)
    assert (result.done, result.left, Ahead.submitted) == (0, 4, 4)
