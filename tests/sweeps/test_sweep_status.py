"""The status of a sweep: the time left, and which progress files count."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandmask.records import RunSpec
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, SweepStatus, _progress, expand, run_sweep, sweep_status
from sandmask.sweeps._locks import claim
from sandmask.sweeps._progress import ProgressWriter, read_json, write_json
from sandmask.sweeps._stacks import stack_id
from sandmask.sweeps._status import write_work
from sandmask.sweeps.executors import InlineExecutor
from sandmask.training import Progress

Make = Callable[..., SweepSpec]
Train = Callable[..., None]
STEPS = 7


@pytest.fixture
def runs(small_sweep: Make) -> tuple[RunSpec, ...]:
    return expand(small_sweep()).runs


def progress_of(folder: SweepFolder, specs: Sequence[RunSpec]) -> ProgressWriter:
    folder.stacks.mkdir(parents=True, exist_ok=True)
    return ProgressWriter(folder, stack_id(specs), specs, device="cpu", stop=lambda: False)


@pytest.fixture
def train(folder: SweepFolder) -> Iterator[Train]:
    """Stacks that seem to train until the test ends."""
    with ExitStack() as held:

        def start(specs: Sequence[RunSpec], *, done: int, rate: float) -> None:
            progress_of(folder, specs).write("running", done=done, rate=rate)
            assert held.enter_context(claim(folder.stacks, stack_id(specs), [spec.id for spec in specs]))

        yield start


def seconds_left(folder: SweepFolder, runs: Sequence[RunSpec]) -> float | None:
    found = sweep_status(folder, runs).seconds_left
    assert found == sweep_status(folder, runs).to_json()["seconds_left"]
    return found


def test_the_time_left_is_by_the_work_of_runs(folder: SweepFolder, runs: Sequence[RunSpec], train: Train) -> None:
    train(runs[:2], done=1, rate=2.0)
    small = {run.id: 1.0 for run in runs[2:]}
    write_work(folder, {runs[0].id: 100.0, runs[1].id: 100.0, **small})
    assert seconds_left(folder, runs) == pytest.approx((2 * 6 * 100 + 10 * STEPS) / (2 * 100))
    write_work(folder, small)  # of a run that it does not have, the mean
    assert seconds_left(folder, runs) == pytest.approx((2 * 6 + 10 * STEPS) / 2)


@pytest.mark.parametrize("content", [None, b"{", b"{}", b'{"runs": {}, "crc32": 0}'])
def test_without_the_work_of_runs_the_time_left_is_by_steps(
    folder: SweepFolder, runs: Sequence[RunSpec], train: Train, content: bytes | None
) -> None:
    train(runs[:2], done=1, rate=2.0)
    if content is not None:
        folder.work.write_bytes(content)
    assert seconds_left(folder, runs) == pytest.approx((2 * 6 + 10 * STEPS) / 2)


def test_the_time_left_is_at_least_that_of_the_last_stack(
    folder: SweepFolder, runs: Sequence[RunSpec], train: Train
) -> None:
    train(runs[:6], done=6, rate=60.0)
    train(runs[6:], done=0, rate=1.0)
    assert seconds_left(folder, runs) == pytest.approx(6 * STEPS)


def test_a_stack_without_a_rate_is_as_fast_as_the_others(
    folder: SweepFolder, runs: Sequence[RunSpec], train: Train
) -> None:
    assert seconds_left(folder, runs) is None
    train(runs[:6], done=0, rate=0.0)
    assert seconds_left(folder, runs) is None
    train(runs[6:], done=5, rate=0.5)
    assert seconds_left(folder, runs) == pytest.approx((6 * STEPS + 6 * 2) / (2 * 0.5))


def test_start_up_is_no_part_of_the_rate(
    folder: SweepFolder, runs: Sequence[RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 0.0))
    progress = progress_of(folder, runs[:2])
    follow = progress.follow(runs[:2])
    rates = []
    for done, seconds in enumerate((9.0, 0.0, 8.0, 7.0, 2.0, 2.0), 1):
        clock[0] += seconds
        follow(Progress(done, 10))
        rates.append((read_json(progress.path) or {})["rate"])
    assert rates == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    progress.follow(runs[:1])(Progress(1, 10))  # a part, where memory is short
    assert (read_json(progress.path) or {})["runs"] == 1


def go(folder: SweepFolder, sweep: SweepSpec, **arguments: Any) -> None:
    folder.accept(sweep)
    options = JobOptions(str(folder.path), device="cpu")
    assert run_sweep(folder, expand(sweep), options, InlineExecutor, lambda _: 3, **arguments).failed == {}


def test_the_driver_writes_the_work_of_missing_runs(folder: SweepFolder, small_sweep: Make) -> None:
    go(folder, small_sweep(n_hparams=1), work=lambda _: 1.0)
    old = {run.id for run in expand(small_sweep(n_hparams=1)).runs}
    go(folder, small_sweep(), work=lambda spec: float(spec.hparams_seed))
    assert (read_json(folder.work) or {})["runs"] == {
        run.id: 1.0 for run in expand(small_sweep()).runs if run.id not in old
    }


def test_runs_whose_work_cannot_be_estimated_are_trained(folder: SweepFolder, small_sweep: Make) -> None:
    def broken(_: RunSpec) -> float:
        raise ValueError("made up")

    go(folder, small_sweep(), work=broken)
    assert not folder.work.exists()


@pytest.fixture
def swept(folder: SweepFolder, small_sweep: Make) -> Callable[[], SweepStatus]:
    """A sweep that was trained; the function returns its status."""
    sweep = small_sweep()
    go(folder, sweep)
    return lambda: sweep_status(folder, expand(sweep).runs)


def files(folder: SweepFolder, algorithm: str) -> list[Path]:
    """The progress files of an algorithm."""
    found = folder.stacks.glob("*.progress.json")
    return [path for path in found if (read_json(path) or {})["algorithm"] == algorithm]


def test_deleted_records_have_no_standing(
    folder: SweepFolder, small_sweep: Make, swept: Callable[[], SweepStatus]
) -> None:
    whole = swept().standings
    assert [row.algorithm for row in whole] == ["ERM", "SANDMask"]
    stacks = [path.name.split(".")[0] for path in files(folder, "ERM")]
    for stack in stacks:
        folder.records(stack).unlink()
    assert swept().standings == whole[1:]
    folder.checkpoint(stacks[0]).touch()  # stopped, and can go on
    assert [row.algorithm for row in swept().standings] == ["ERM", "SANDMask"]
    folder.checkpoint(stacks[0]).unlink()
    go(folder, small_sweep())
    assert swept().standings == whole


def test_of_a_run_in_two_stacks_the_later_one_counts(folder: SweepFolder, swept: Callable[[], SweepStatus]) -> None:
    whole = swept().standings
    data = read_json(files(folder, "ERM")[0]) or {}
    better = [{**cell, "value": 2.0, "held_out": 2.0} for cell in data["cells"]]
    for updated, is_same in ((0.0, True), (data["updated"] + 1, False)):
        write_json(folder.progress("other"), {**data, "stack": "other", "cells": better, "updated": updated})
        assert (swept().standings == whole) is is_same


@pytest.mark.parametrize(("values", "best"), [((0.5, 0.6), 1), ((0.6, 0.5), 0), ((0.6, 0.6), 1)])
@pytest.mark.parametrize("order", [1, -1])
def test_the_best_draw_counts_and_of_equal_ones_the_last(
    folder: SweepFolder, swept: Callable[[], SweepStatus], values: tuple[float, float], best: int, order: int
) -> None:
    for path in files(folder, "ERM"):
        data = read_json(path) or {}
        cells = [{**cell, "value": values[cell["draw"]], "held_out": cell["draw"]} for cell in data["cells"][::order]]
        write_json(path, {**data, "cells": cells})
    row = swept().standings[0]
    assert (row.algorithm, row.accuracy, row.cells) == ("ERM", best, 3)
