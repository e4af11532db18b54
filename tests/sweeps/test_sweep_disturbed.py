"""What may come between: interrupts, once and again, damaged files, other programs and users at the same folder."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from io import FileIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sandmask._files import lock
from sandmask._signals import TerminatedError, deferred, sigterm_raises, stop_requested
from sandmask.api import _progress as display_module
from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunRecord, RunSpec
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, SweepStatus, expand, run_sweep, sweep_status
from sandmask.sweeps import _job as job_module
from sandmask.sweeps import _locks as locks_module
from sandmask.sweeps._locks import claim, claims, turn
from sandmask.sweeps._progress import read_json
from sandmask.sweeps.executors import InlineExecutor, WorkerExecutor
from sandmask.training import train_stack

Make = Callable[..., SweepSpec]


def test_who_may_only_read_a_folder_sees_what_is_under_way(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, mode: str = "r") -> FileIO:
        if mode != "r":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return FileIO(path, mode)

    folder.accept(small_sweep())
    with claim(folder.stacks, "other", ["a run"]):
        monkeypatch.setattr(locks_module, "FileIO", read_only)
        with turn(folder.stacks):
            assert claims(folder.stacks) == {"other": ["a run"]}
        assert sweep_status(folder, expand(small_sweep()).runs).planned == 12
        monkeypatch.undo()


def test_a_request_is_changed_by_one_program_at_a_time(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def look(*_: object) -> None:
        with FileIO(folder.stacks / ".turn", "a+") as file:
            held.append(not lock(file))

    monkeypatch.setattr("sandmask.sweeps._folder.write_sweep", look)
    folder.accept(small_sweep())
    assert held == [True]


def test_a_claim_ends_where_the_disk_has_become_read_only(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    folder.accept(small_sweep())
    with monkeypatch.context() as patch:
        with claim(folder.stacks, "mine", ["a run"]) as mine:
            assert mine
            patch.setattr(Path, "unlink", refuse)
        with turn(folder.stacks):
            assert claims(folder.stacks) == {}
    with claim(folder.stacks, "mine", ["a run"]) as again:
        assert again


def test_a_damaged_lock_file_is_still_a_lock(folder: SweepFolder, small_sweep: Make) -> None:
    folder.accept(small_sweep())
    with claim(folder.stacks, "mine", ["a run"]):
        (folder.stacks / "mine.lock").write_bytes(b"\xff[")
        with turn(folder.stacks):
            assert claims(folder.stacks) == {"mine": []}
        with claim(folder.stacks, "mine", ["a run"]) as again:
            assert not again


def test_a_file_system_without_locks_is_not_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(SandmaskError, match=r"records.jsonl cannot be locked: No locks available"):
        RecordWriter(tmp_path / "records.jsonl")


def test_a_second_interrupt_leaves_nothing_behind(folder: SweepFolder, small_sweep: Make) -> None:
    class Impatient(InlineExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise KeyboardInterrupt

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            assert (wait, cancel_futures, len(list(folder.stacks.glob("*.stop")))) == (True, True, 1)
            raise KeyboardInterrupt

    sweep = small_sweep()
    folder.accept(sweep)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(folder, expand(sweep), JobOptions(str(folder.path)), Impatient, lambda _: 100)
    assert not list(folder.stacks.glob("*.stop"))


@pytest.mark.parametrize(
    ("base", "error", "said"),
    [
        (Executor, KeyboardInterrupt, ["Workers finish their steps and save. Press Ctrl-C again to stop now."]),
        (Executor, TerminatedError, []),
        (InlineExecutor, KeyboardInterrupt, []),  # nothing is waited for
    ],
)
def test_ctrl_c_says_what_it_waits_for(
    folder: SweepFolder, small_sweep: Make, base: type[Executor], error: type[BaseException], said: list[str]
) -> None:
    class Interrupted(base):  # type: ignore[misc, valid-type]
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise error

    sweep, notices = small_sweep(), list[str]()
    folder.accept(sweep)
    with pytest.raises(error):
        run_sweep(folder, expand(sweep), JobOptions(str(folder.path)), Interrupted, lambda _: 100, notices.append)
    assert notices == said


def test_workers_are_told_to_end_where_no_file_can_be_written(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(InlineExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            monkeypatch.setattr(Path, "touch", full)
            raise KeyboardInterrupt

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            ended.append(cancel_futures)

    sweep = small_sweep()
    folder.accept(sweep)
    with pytest.raises(KeyboardInterrupt):  # the first error, and not the full disk
        run_sweep(folder, expand(sweep), JobOptions(str(folder.path)), Full, lambda _: 100)
    assert ended == [True]


@pytest.mark.parametrize("content", [b"", b"no Parquet"])
def test_an_archive_that_is_damaged_meanwhile_is_named_and_no_lost_worker(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    sweep = small_sweep()
    folder.accept(sweep)
    notices: list[str] = []

    def damaging(specs: Sequence[RunSpec], *args: Any, **options: Any) -> list[RunRecord]:
        (folder.stacks / "bad.records.parquet").write_bytes(content)
        return train_stack(specs, *args, **options)

    monkeypatch.setattr(job_module, "train_stack", damaging)
    options = JobOptions(str(folder.path), device="cpu")
    with pytest.raises(
        SandmaskError, match=r"bad.records.parquet cannot be read: .* Restore it, or remove it."
    ) as error:
        run_sweep(folder, expand(sweep), options, InlineExecutor, lambda _: 100, notices.append)
    assert "\n" not in str(error.value)
    assert notices == []


@pytest.mark.skipif(sys.platform == "win32", reason="has no signal masks")
def test_workers_are_born_deaf_to_an_interrupt_and_a_second_one_of_the_driver_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    workers = WorkerExecutor(1)  # one for both: a start takes seconds
    blocked = workers.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    (process,) = workers._processes.values()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessPoolExecutor, "shutdown", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.shutdown()
    deadline = time.monotonic() + 30  # a kill is heard a little later
    while (alive := process.is_alive()) and time.monotonic() < deadline:  # the pool's thread may reap it first
        time.sleep(0.05)
    workers.shutdown()
    assert not alive


def _signalled() -> bool:
    signal.raise_signal(signal.SIGTERM)
    return bool(stop_requested())


def test_a_deferred_signal_is_delivered_at_the_end_of_the_block() -> None:
    seen = []
    with pytest.raises(TerminatedError), sigterm_raises(), deferred(signal.SIGTERM):
        seen.append(_signalled())
    assert (seen, stop_requested()) == ([True], False)


@pytest.mark.skipif(sys.platform == "win32", reason="has no process groups")
def test_sigterm_to_the_whole_process_group_ends_workers_after_they_have_saved(
    start_program: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    asked = "--datasets DebugVector --algorithms ERM,SANDMask --n-hparams 1 --n-trials 1 --hparam mlp_width=8"
    small = "--hparam batch_size=8 --steps 1000000 --checkpoint-every 100 --no-calibrate"
    options = "--device cpu --workers 2 --checkpoint-seconds 3600"
    folder, said = SweepFolder(tmp_path / "sweep"), tmp_path / "stderr"
    driver = start_program("sweep", "run", str(folder.path), *f"{asked} {small} {options}".split(), stderr=said)

    def trained() -> int:
        return sum((read_json(path) or {}).get("done", 0) > 0 for path in folder.stacks.glob("*.progress.json"))

    deadline = time.monotonic() + 120
    while trained() < 2:
        assert driver.exitcode is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(driver.pid or 0, signal.SIGTERM)
    driver.join(120)
    assert (driver.exitcode, said.read_text().splitlines()[-1].split(";")[0]) == (143, "stopped")
    assert len(list(folder.stacks.glob("*.checkpoint.safetensors"))) == 2


def test_a_file_that_cannot_be_read_does_not_end_the_display(
    folder: SweepFolder, small_sweep: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display_module, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(display_module, "LINE_SECONDS", 0.0)
    looks, twice = [], threading.Event()

    def look() -> SweepStatus:
        looks.append(1)
        if len(looks) == 1:
            raise SandmaskError("damaged")
        status = sweep_status(folder, expand(small_sweep()).runs)
        if len(looks) == 3:  # what the second one saw has been said
            twice.set()
        return status

    with display_module.SweepDisplay(look, "lines"):
        assert twice.wait(60)
    assert "0/12 runs done" in capsys.readouterr().err
