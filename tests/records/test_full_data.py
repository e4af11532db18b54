"""Runs on all data take their validation accuracies from the same runs with examples held back."""

from dataclasses import replace

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec, judged_by_first_stage
from sandmask.reports import build_report


def record(full: bool, draw: int, outside: float, test: float) -> RunRecord:
    hparams = {"lr": 0.1 * (draw + 1), **({"full_data": 1} if full else {})}
    spec = RunSpec("DebugVector", "ERM", (0,), 11, 5, hparams, hparams_seed=draw)
    steps = np.array([0, 5, 10])
    inside = np.tile([test, 0.9, 0.9], (3, 1))
    out = np.tile([test, outside, outside], (3, 1))
    return RunRecord(spec, ("a", "b", "c"), steps, inside, out, {"loss": np.zeros(3)}, "done")


def test_a_full_run_is_selected_by_its_first_stage() -> None:
    firsts = [record(False, 0, 0.7, 0.1), record(False, 1, 0.8, 0.2)]
    fulls = [record(True, 0, 1.0, 0.3), record(True, 1, 0.9, 0.4)]  # by their own numbers, the first would win
    judged = list(judged_by_first_stage([*firsts, *fulls]))
    assert judged[:2] == firsts
    for first, full, found in zip(firsts, fulls, judged[2:], strict=True):
        np.testing.assert_array_equal(found.accuracy_out[:, 1:], first.accuracy_out[:, 1:])
        np.testing.assert_array_equal(found.accuracy_out[:, 0], full.accuracy_out[:, 0])
        np.testing.assert_array_equal(found.accuracy_in, full.accuracy_in)
    report = build_report([*firsts, *fulls], ["training-domain"])
    shown = str(report)
    assert "full_data=1" in shown
    assert "40.0" in shown
    assert "30.0" not in shown


def test_evaluations_that_the_first_stage_lacks_are_left_out() -> None:
    first, full = (
        record(False, 0, 0.7, 0.1),
        replace(record(True, 0, 1.0, 0.3), tables={"confusion": np.zeros((3, 6), dtype=np.int64)}),
    )
    short = replace(first.at(slice(2)), metrics={}, status="running")
    found = next(judged_by_first_stage([full, short]))
    assert found.steps.tolist() == [0, 5]
    assert found.metrics["loss"].shape == (2,)
    assert found.tables["confusion"].shape == (2, 6)
    assert found.status == "running"  # the oracle would take its last evaluation, which is not the run's


def test_a_full_run_is_selected_by_the_metrics_of_its_first_stage() -> None:
    names = [f"f1/{split}/{env}" for split in ("in", "out") for env in range(3)]
    first, full = (
        replace(record(stage, 0, 0.5, 0.5), metrics={name: np.full(3, value) for name in names})
        for stage, value in ((False, 0.25), (True, 1.0))
    )
    found = list(judged_by_first_stage([first, full]))[1].metrics
    assert {name: values[0] for name, values in found.items() if values[0] < 1} == {"f1/out/1": 0.25, "f1/out/2": 0.25}


def test_a_full_run_keeps_its_sizes() -> None:
    sizes = ((40,) * 3, (10,) * 3)
    first, full = (replace(record(stage, 0, 0.5, 0.5), sizes=sizes) for stage in (False, True))
    assert list(judged_by_first_stage([first, full]))[1].sizes == sizes


def test_a_full_run_alone_is_refused() -> None:
    with pytest.raises(SandmaskError, match="same run without full_data, which is not among these records"):
        list(judged_by_first_stage([record(True, 0, 1.0, 0.3)]))
