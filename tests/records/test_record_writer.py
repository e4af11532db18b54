"""The writer: what it appends is read back exactly, whatever a kill left behind."""

import multiprocessing
import os
import resource
import signal
import sys
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmask._files import lock
from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunRecord, read_runs
from sandmask.records._lines import encoded, eval_line, metric_value
from sandmask.records.testing import assert_same_runs, made_up_run, made_up_sweep


def write(writer: RecordWriter, run: RunRecord, begin: int = 0, stop: int | None = None) -> str:
    name = writer.start(run.spec, run.env_names, run.classes, run.sizes)
    for index in range(begin, len(run.steps) if stop is None else stop):
        metrics = {key: float(values[index]) for key, values in run.metrics.items()}
        writer.evaluation(name, int(run.steps[index]), run.accuracy_in[index], run.accuracy_out[index], metrics)
    if stop is None and run.status != "running":
        writer.end(name, run.status, int(run.diverged_at or run.steps[-1]))
    return name


@pytest.mark.parametrize("status", ["done", "diverged", "running"])
def test_what_is_written_is_read_back(tmp_path: Path, status: str) -> None:
    run = made_up_run([[1 / 3, 0.1], [2 / 7, 1.0]], [[0.7, 1e-17], [0.0, 5 / 6]], status=status)  # type: ignore[arg-type]
    with RecordWriter(tmp_path / "new" / "records.jsonl") as writer:
        write(writer, run)
    assert_same_runs(read_runs(tmp_path), [run])


@given(st.dictionaries(st.text(max_size=5), st.floats(), max_size=3), st.lists(st.floats(0, 1), min_size=1))
def test_every_float_survives_its_line(metrics: dict[str, float], accuracies: list[float]) -> None:
    import json

    line = json.loads(encoded(eval_line("x", 1, accuracies, accuracies, metrics, {}), 0)[0])
    assert line["in"] == accuracies
    for name, value in metrics.items():
        assert np.array_equal(metric_value(line["metrics"][name]), value, equal_nan=True)


def test_runs_of_a_stack_take_turns_in_one_file(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "IRM"], draws=2)
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        for index in range(len(runs[0].steps)):
            for run in runs:
                write(writer, run, index, index + 1)
        for run in runs:
            write(writer, run, len(run.steps))
    for run, read in zip(runs, read_runs(tmp_path), strict=True):
        assert_same_runs([read], [run])


def test_a_file_cut_anywhere_is_read_and_continued(tmp_path: Path) -> None:
    run = made_up_run((np.arange(12) / 11).reshape(4, 3).tolist(), size=11)
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        write(writer, run)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        before = read_runs(path)
        complete = whole[:size].count(b"\n")
        assert sum(1 + len(read.steps) for read in before) == complete
        with RecordWriter(path) as writer:
            last = writer.last_step(run.spec.id)
            write(writer, run, 0 if last is None else last // 100 + 1)
        assert path.read_bytes() == whole


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        write(writer, made_up_run([[0.5, 0.5]]))
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(200_000))
    assert len(read_runs(path)) == 1
    RecordWriter(path).close()
    assert path.read_bytes() == whole


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        write(writer, made_up_run([[0.5, 0.5]]))
        read_runs(path)  # reading must not release the lock
        with pytest.raises(SandmaskError, match=r"records\.jsonl is being written by another process"):
            RecordWriter(path)
        writer.rewind(made_up_run([[0.5, 0.5]]).spec.id, -1)  # the replaced file is locked too
        with pytest.raises(SandmaskError, match="one writer"):
            RecordWriter(path)
    RecordWriter(path).close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_lock_dies_with_a_killed_writer_although_its_worker_lives(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    pipe_read, pipe_write = os.pipe()

    def writer_with_worker() -> None:
        writer = RecordWriter(path)
        write(writer, made_up_run([[0.5, 0.5]]))
        worker = os.fork()
        if worker == 0:
            os.close(pipe_write)
            ready.set()
            os.read(pipe_read, 1)  # lives until the test closes its end
            os._exit(0)
        signal.pause()

    process = context.Process(target=writer_with_worker)
    process.start()
    assert ready.wait(20)
    with pytest.raises(SandmaskError, match="another process"):
        RecordWriter(path)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        RecordWriter(path).close()
    finally:
        os.close(pipe_write)
        os.close(pipe_read)


def test_a_file_replaced_between_opening_and_locking_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, newer = tmp_path / "records.jsonl", tmp_path / "newer"
    with RecordWriter(newer) as writer:
        write(writer, made_up_run([[0.5, 0.5]]))

    def lock_after_a_rewind(file: FileIO) -> bool:
        if newer.exists():
            newer.replace(path)
        return lock(file)

    monkeypatch.setattr("sandmask.records._writer.lock", lock_after_a_rewind)
    with RecordWriter(path) as writer:
        assert writer.last_step(made_up_run([[0.5, 0.5]]).spec.id) == 0


def test_rewinding_equals_never_having_written(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM"], environments=2, draws=2, trials=1, checkpoints=4)
    for keep in range(-1, 4):
        expected, rewound = tmp_path / f"expected{keep}.jsonl", tmp_path / f"rewound{keep}.jsonl"
        with RecordWriter(expected) as writer:
            write(writer, runs[0], 0, keep + 1)
            write(writer, runs[1])
            write(writer, runs[2], 0, keep + 1)
        with RecordWriter(rewound) as writer:
            for run in runs[:3]:
                write(writer, run)
            writer.rewind([runs[0].spec.id, runs[2].spec.id, "unknown"], keep * 100)
            assert writer.last_step(runs[0].spec.id) == (keep * 100 if keep >= 0 else None)
            assert writer.status(runs[0].spec.id) == "running"
            assert writer.status(runs[1].spec.id) == "done"
            assert rewound.read_bytes() == expected.read_bytes()
            write(writer, runs[0], keep + 1)
        assert [read.status for read in read_runs(rewound)] == ["done", "done", "running"]
        assert_same_runs(read_runs(rewound)[:1], runs[:1])
    assert sorted(tmp_path.iterdir()) == sorted([*tmp_path.glob("expected*"), *tmp_path.glob("rewound*")])


def test_rewinding_to_the_present_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        name = write(writer, made_up_run([[0.5, 0.5], [1.0, 1.0]]), 0, 2)
        inode = path.stat().st_ino
        writer.rewind(name, 100)
        assert path.stat().st_ino == inode


def test_steps_only_go_forward_and_ends_are_final(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        with pytest.raises(SandmaskError, match="Call `start`"):
            writer.evaluation("nobody", 0, [0.5], [0.5])
        name = write(writer, made_up_run([[0.5, 0.5], [1.0, 1.0]], size=2))
        with pytest.raises(SandmaskError, match=r"has ended \(done\)"):
            writer.evaluation(name, 300, [0.5, 0.5], [0.5, 0.5])
        writer.rewind(name, 100)
        with pytest.raises(SandmaskError, match="already has step 100, so step 100 cannot follow"):
            writer.evaluation(name, 100, [0.5, 0.5], [0.5, 0.5])
        with pytest.raises(ValueError, match="there are accuracies of 1 environments, but 2 are named"):
            writer.evaluation(name, 200, [0.5], [0.5, 0.5])
        with pytest.raises(ValueError, match=r"numbers from 0 to 1, not 50\.0"):
            writer.evaluation(name, 200, [50.0, 0.5], [0.5, 0.5])
        with pytest.raises(ValueError, match="numbers from 0 to 1, not nan"):
            writer.evaluation(name, 200, [float("nan"), 0.5], [0.5, 0.5])
        with pytest.raises(ValueError, match=r"counts over splits of \[2, 2\], not 0\.3"):
            writer.evaluation(name, 200, [0.5, 0.5], [0.5, 0.3])


def test_a_run_is_not_continued_on_other_data(tmp_path: Path) -> None:
    run = made_up_run([[0.5, 0.5], [1.0, 1.0]], size=2)
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        write(writer, run, 0, 1)
        with pytest.raises(SandmaskError, match="splits of other sizes, so the data or --train-eval-limit has changed"):
            writer.start(run.spec, run.env_names, run.classes, ((2, 2), (2, 4)))
        writer.start(run.spec, run.env_names, run.classes)  # a program that does not know them
        write(writer, run, 1)
    assert_same_runs(read_runs(tmp_path)[:1], [run])


def test_a_foreign_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"some": "thing"}\n')
    with pytest.raises(SandmaskError, match=r"records\.jsonl:1 is not a line of a record file"):
        RecordWriter(path)
    assert path.read_text() == '{"some": "thing"}\n'


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep files that are cut off at the limit
    with RecordWriter(path) as writer:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match=r"File too large: '.*records\.jsonl'"):
                write(writer, made_up_run([[0.5, 0.5]]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
