"""The driver: what is missing and nothing else, whatever happened before."""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from sandmask.datasets import Dataset, load_dataset
from sandmask.records import RunRecord, RunSpec, read_runs
from sandmask.records.testing import assert_same_runs
from sandmask.sweeps import (
    Estimator,
    JobOptions,
    SweepFolder,
    SweepResult,
    SweepSpec,
    expand,
    run_sweep,
    sweep_status,
)
from sandmask.sweeps import _job as job_module
from sandmask.sweeps._locks import claim, claimed, turn
from sandmask.sweeps.executors import InlineExecutor
from sandmask.training import Progress, train_stack

Make = Callable[..., SweepSpec]


def go(
    folder: SweepFolder,
    sweep: SweepSpec,
    cap: int = 100,
    executor: Callable[[], Executor] = InlineExecutor,
    notice: Callable[[str], None] = print,
    **options: Any,
) -> SweepResult:
    folder.accept(sweep)
    job = JobOptions(str(folder.path), device="cpu", **options)
    return run_sweep(folder, expand(sweep), job, executor, lambda _: cap, notice)


def test_estimates_and_jobs_of_a_process_load_a_dataset_once(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(name: str, *rest: Any) -> Dataset:
        loaded.append(name)
        return load_dataset(name, *rest)

    monkeypatch.setattr(job_module, "load_dataset", load)
    job_module.planned_dataset.cache_clear()
    expansion = expand(small_sweep())
    assert Estimator(expansion, JobOptions(""), "cpu", measure=False).step_work(expansion.runs[0]) > 0
    go(folder, small_sweep())
    assert loaded == ["DebugVector"]


class Watched:
    """`train_stack` that notes what it is asked for, and can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stacks: list[list[str]] = []
        self.began: list[int] = []
        self.fail: Callable[[Sequence[RunSpec], Progress], None] = lambda _specs, _progress: None
        monkeypatch.setattr(job_module, "train_stack", self)
        monkeypatch.setattr(job_module, "_limits", {})

    def __call__(self, specs: Sequence[RunSpec], *args: Any, on_progress: Any, **options: Any) -> list[RunRecord]:
        self.stacks.append([spec.id for spec in specs])
        first: list[int] = []

        def watching(progress: Progress) -> None:
            if not first:
                first.append(progress.done)
                self.began.append(progress.done)
            self.fail(specs, progress)
            on_progress(progress)

        return train_stack(specs, *args, on_progress=watching, **options)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_all_runs_are_trained_and_a_second_time_none(folder: SweepFolder, small_sweep: Make, watched: Watched) -> None:
    sweep = small_sweep()
    result = go(folder, sweep)
    assert (result.done, result.failed) == (12, {})
    runs = read_runs(folder.path)
    assert {run.spec.id for run in runs} == {run.id for run in expand(sweep).runs}
    assert all(run.status == "done" and list(run.steps) == [0, 3, 6] for run in runs)
    before = len(watched.stacks)
    go(folder, sweep, cap=2)  # grouped otherwise, and still nothing is missing
    assert len(watched.stacks) == before
    assert not list(folder.stacks.glob("*.checkpoint.safetensors"))
    assert not list(folder.stacks.glob("*.lock"))


def test_extending_trains_the_new_runs_only(folder: SweepFolder, small_sweep: Make, watched: Watched) -> None:
    go(folder, small_sweep(algorithms=("SANDMask",)))
    old = {run.spec.id for run in read_runs(folder.path)}
    watched.stacks.clear()
    go(folder, small_sweep(n_trials=2))
    assert {run for stack in watched.stacks for run in stack} == {
        run.id for run in expand(small_sweep(n_trials=2)).runs
    } - old


def interrupt_second_stack(folder: SweepFolder, sweep: SweepSpec, watched: Watched) -> Path:
    """Stop a sweep five steps into its second stack; that one's checkpoint."""
    seen = list(watched.stacks)

    def interrupt(specs: Sequence[RunSpec], progress: Progress) -> None:
        if len(watched.stacks) == len(seen) + 2 and progress.done == 5:
            raise KeyboardInterrupt

    watched.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        go(folder, sweep)
    watched.fail = lambda _specs, _progress: None
    watched.began.clear()
    (checkpoint,) = folder.stacks.glob("*.checkpoint.safetensors")
    return checkpoint


def test_an_interrupt_saves_and_the_next_run_goes_on(
    tmp_path: Path, folder: SweepFolder, small_sweep: Make, watched: Watched
) -> None:
    whole = SweepFolder(tmp_path / "whole")
    sweep = small_sweep()
    go(whole, sweep)
    interrupt_second_stack(folder, sweep, watched)
    status = sweep_status(folder, expand(sweep).runs)
    assert 0 < status.done < status.planned
    go(folder, sweep, cap=2)  # smaller stacks now: the half-trained one is split, and keeps its five steps
    assert 6 in watched.began
    assert_same_runs(read_runs(folder.path), read_runs(whole.path))
    assert not list(folder.stacks.glob("*.checkpoint.safetensors"))


def test_a_damaged_checkpoint_is_not_gone_on_with(
    tmp_path: Path, folder: SweepFolder, small_sweep: Make, watched: Watched
) -> None:
    whole = SweepFolder(tmp_path / "whole")
    go(whole, small_sweep())
    checkpoint = interrupt_second_stack(folder, small_sweep(), watched)
    data = bytearray(checkpoint.read_bytes())
    data[-100] ^= 1
    checkpoint.write_bytes(data)
    go(folder, small_sweep())
    assert 6 not in watched.began
    assert_same_runs(read_runs(folder.path), read_runs(whole.path))


def test_out_of_memory_splits_and_loses_no_step(
    tmp_path: Path, folder: SweepFolder, small_sweep: Make, watched: Watched
) -> None:
    whole = SweepFolder(tmp_path / "whole")
    sweep = small_sweep(algorithms=("SANDMask",), n_trials=2, hparams={"mlp_width": 8, "batch_size": 8, "mlp_depth": 3})
    go(whole, sweep)
    assert [len(stack) for stack in watched.stacks] == [12]

    def too_much(specs: Sequence[RunSpec], progress: Progress) -> None:
        if len(specs) > 3 and progress.done == 4:
            raise torch.OutOfMemoryError("made up")

    watched.stacks.clear()
    watched.began.clear()
    watched.fail = too_much
    assert go(folder, sweep).failed == {}
    assert [len(stack) for stack in watched.stacks] == [12, 6, 3, 3, 3, 3]
    assert watched.began == [1, 4, 4, 4, 4, 4]  # none starts over
    assert_same_runs(read_runs(folder.path), read_runs(whole.path))


def test_a_run_too_large_for_the_machine_is_reported_and_the_others_go_on(
    folder: SweepFolder, small_sweep: Make, watched: Watched
) -> None:
    def too_much(specs: Sequence[RunSpec], progress: Progress) -> None:
        if specs[0].algorithm == "SANDMask":
            raise torch.OutOfMemoryError("made up")

    watched.fail = too_much
    result = go(folder, small_sweep())
    assert result.done == 6
    assert len(result.failed) == 6
    assert "too little memory for a single run of SANDMask" in next(iter(result.failed.values()))


def test_a_bug_in_one_method_does_not_stop_the_others(folder: SweepFolder, small_sweep: Make, watched: Watched) -> None:
    def broken(specs: Sequence[RunSpec], progress: Progress) -> None:
        if specs[0].algorithm == "SANDMask":
            raise ZeroDivisionError("of the method's own")

    watched.fail = broken
    result = go(folder, small_sweep())
    assert (result.done, len(result.failed)) == (6, 6)
    for log in {Path(message.split("see ")[1]) for message in result.failed.values()}:
        assert "ZeroDivisionError: of the method's own" in log.read_text()


def test_a_full_disk_is_a_reason_to_stop_and_not_a_lost_worker(
    folder: SweepFolder, small_sweep: Make, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(_specs: Sequence[RunSpec], _progress: Progress) -> None:
        monkeypatch.setattr(Path, "write_text", full)
        full()

    watched.fail = fill
    result = go(folder, small_sweep())
    assert (result.done, len(result.failed), len(watched.stacks)) == (0, 12, 1)
    named, other = sorted(set(result.failed.values()))
    assert named == f"{folder.stacks}: No space left on device"
    assert other == "OSError: [Errno 28] No space left on device"  # of the first stack: this one named no file


class Dead(InlineExecutor):
    """Loses the worker of every job."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        lost: Future[Any] = Future()
        lost.set_exception(BrokenProcessPool("killed"))
        return lost


class Fragile(Dead):
    """Loses the worker of every job but each third."""

    count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        Fragile.count += 1
        if Fragile.count % 3 == 1:
            raise BrokenProcessPool("a worker was lost before")
        if Fragile.count % 3 == 2:
            return super().submit(fn, *args, **kwargs)
        return InlineExecutor.submit(self, fn, *args, **kwargs)


def test_lost_workers_cost_time_only(folder: SweepFolder, small_sweep: Make) -> None:
    notices: list[str] = []
    result = go(folder, small_sweep(), executor=Fragile, notice=notices.append)
    assert (result.done, result.failed) == (12, {})
    assert any("a worker was lost" in notice for notice in notices)


def test_workers_that_never_live_are_given_up_and_losses_in_a_row_are_one_line(
    folder: SweepFolder, small_sweep: Make
) -> None:
    notices: list[str] = []
    result = go(folder, small_sweep(), executor=Dead, notice=notices.append)
    assert len(notices) == 1
    assert (result.done, len(result.failed)) == (0, 12)
    reason = "workers were lost 21 times in a row, most recently by BrokenProcessPool: killed"
    assert set(result.failed.values()) == {reason}


def test_one_lost_worker_is_one_loss_however_many_stacks_waited(folder: SweepFolder, small_sweep: Make) -> None:
    executors = iter([Dead(), InlineExecutor()])
    notices: list[str] = []
    result = go(folder, small_sweep(n_hparams=4), 1, executor=lambda: next(executors), notice=notices.append)
    assert (result.done, result.failed) == (24, {})
    assert notices == ["a worker was lost (BrokenProcessPool: killed); scheduled again: 24 runs"]


def test_runs_that_another_process_trains_are_left_to_it(folder: SweepFolder, small_sweep: Make) -> None:
    sweep = small_sweep()
    folder.accept(sweep)
    runs = expand(sweep).runs
    job = job_module.Job("DebugVector", tuple(run.to_json() for run in runs[:3]), JobOptions(str(folder.path)))
    with claim(folder.stacks, "other", [runs[2].id]) as mine:
        assert mine
        assert job_module.run_job(job).state == "taken"
        with turn(folder.stacks):
            assert claimed(folder.stacks) == {runs[2].id}
        with claim(folder.stacks, "overlapping", [runs[1].id, runs[2].id]) as second:
            assert not second
    with turn(folder.stacks):
        assert claimed(folder.stacks) == set()


def test_what_is_wrong_with_every_stack_is_said_once(folder: SweepFolder, small_sweep: Make, tmp_path: Path) -> None:
    sweep = small_sweep(datasets=("PACS",), network="resnet18", weights="none", hparams={})
    said: list[str] = []
    result = go(folder, sweep, 1, notice=said.append, data_dir=str(tmp_path / "nowhere"))
    assert len(result.failed) == len(expand(sweep).runs) > 1
    assert len(said) == 1
    assert "PACS is not in" in said[0]


def test_networks_that_stack_are_not_compiled(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, bool] = {}

    def watched(part: Sequence[RunSpec], *args: Any, compiled: bool, **rest: Any) -> list[RunRecord]:
        asked[part[0].network] = compiled
        return train_stack(part, *args, **rest)

    monkeypatch.setattr(job_module, "train_stack", watched)
    go(folder, small_sweep(), compiled=True)
    assert asked == {"mlp": False}
    monkeypatch.setattr(job_module, "trains_alone", lambda _: True)
    go(SweepFolder(folder.path / "other"), small_sweep(), compiled=True)
    assert asked == {"mlp": True}


def test_a_checkpoint_that_is_no_file_of_ours_is_not_in_the_way(folder: SweepFolder, small_sweep: Make) -> None:
    folder.accept(small_sweep())
    (folder.stacks / "broken.checkpoint.safetensors").write_bytes(b"nothing")
    assert go(folder, small_sweep()).done == 12
    assert not list(folder.stacks.glob("*.checkpoint.safetensors"))


def test_status_says_what_the_tables_will(folder: SweepFolder, small_sweep: Make) -> None:
    from sandmask.reports import build_report

    sweep = small_sweep(n_hparams=3)
    go(folder, sweep)
    status = sweep_status(folder, expand(sweep).runs)
    assert (status.planned, status.done, status.running, status.missing) == (18, 18, 0, 0)
    assert status.run_steps == status.run_steps_done == 18 * 7
    table = build_report(read_runs(folder.path)).rules[0].datasets["DebugVector"]
    for row in status.standings:
        assert row.cells == 3
        assert 100 * row.accuracy == pytest.approx(table.averages[row.algorithm].mean)
