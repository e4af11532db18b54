"""ERM++'s second stage: a sweep on all data that repeats the drops of the learning rate of the first."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sandmask
from sandmask.errors import SandmaskError
from sandmask.records import read_runs

ASKED: dict[str, Any] = {
    "datasets": "DebugVector",
    "algorithms": "ERM++",
    "test_envs": [0, 1],
    "n_hparams": 1,
    "n_trials": 1,
    "steps": 41,
    "checkpoint_every": 3,
    "averages": "sma",
    "workers": 1,
    "progress": False,
}
HPARAMS = {"mlp_width": 8, "batch_size": 8, "lr": 0.3, "lr_patience": 1, "linear_steps": 2}


def test_the_second_stage_repeats_the_drops_and_is_selected_by_the_first(tmp_path: Path) -> None:
    full = {**ASKED, "hparams": {**HPARAMS, "full_data": 1}, "first_stage": tmp_path / "first"}
    with pytest.raises(SandmaskError, match="first"):
        sandmask.sweep(tmp_path / "full", **full)
    sandmask.sweep(tmp_path / "first", **ASKED, hparams=HPARAMS)
    swept = sandmask.sweep(tmp_path / "full", **full)
    firsts = {run.spec.test_envs: run for run in read_runs(tmp_path / "first")}
    seen = set()
    for spec in swept.runs:
        first = firsts[spec.test_envs]
        drops = first.steps[1:][np.diff(first.metrics["lr_drops"]) > 0].tolist()
        assert [spec.hparams[f"lr_drop_step_{number}"] for number in (1, 2, 3)] == [*drops, 0, 0, 0][:3]
        assert spec.seed == first.spec.seed
        seen.add(tuple(drops))
    assert not any("lr_drops" in run.metrics for run in read_runs(tmp_path / "full"))  # it does not search again
    assert len(seen) == 2
    assert any(seen)
    table = str(sandmask.report([tmp_path / "first", tmp_path / "full"], ["training-domain"]))
    assert "ERMPlusPlus + SMA (full_data=1)" in table
    assert "lr_drop_step" not in table
    assert sandmask.sweep(tmp_path / "full", **full).trained == 0
    with pytest.raises(SandmaskError, match=r"lacks a finished run of ERMPlusPlus on DebugVector with .*draw 1"):
        sandmask.sweep(tmp_path / "full", **{**full, "n_hparams": 2})
