"""`--only`: some runs of a sweep are trained now, the others by a later call."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sandmask
from sandmask.api import Sweep
from sandmask.cli._app import app
from sandmask.errors import SandmaskError
from sandmask.sweeps import SweepSpec, expand
from sandmask.sweeps._only import only_some

WHOLE = expand(
    SweepSpec(
        datasets=("Debug28", "DebugVector"),
        algorithms=("ERM", "SANDMask"),
        n_hparams=3,
        n_trials=2,
        test_envs=("0", "1"),
    )
)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ({"trial": 1}, {run.id for run in WHOLE.runs if run.trial_seed == 1}),
        (["draw=0,2", "trial=0"], {r.id for r in WHOLE.runs if r.hparams_seed != 1 and r.trial_seed == 0}),
        (["draw=0", "draw=2"], {run.id for run in WHOLE.runs if run.hparams_seed != 1}),
        ({"algorithm": "sand-mask"}, {run.id for run in WHOLE.runs if run.algorithm == "SANDMask"}),
        (
            {"test_env": [1], "dataset": ["debugvector"]},
            {run.id for run in WHOLE.runs if run.test_envs == (1,) and run.dataset == "DebugVector"},
        ),
    ],
)
def test_runs_that_meet_all_conditions_are_left(only: object, expected: set[str]) -> None:
    chosen = only_some(WHOLE, only)  # type: ignore[arg-type]
    assert {run.id for run in chosen.runs} == expected
    assert chosen.sources == WHOLE.sources
    assert chosen.notes[-1].startswith(f"--only chooses {len(expected)} of the sweep's {len(WHOLE.runs)} runs")


def test_conditions_that_all_runs_meet_change_nothing() -> None:
    assert only_some(WHOLE, ()) is WHOLE
    assert only_some(WHOLE, {"trial": [0, 1]}) is WHOLE


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["trial=7"], "--only trial=7 leaves no runs"),
        (["trials=1"], "Unknown condition of --only 'trials'.*trial"),
        (["trial"], "should look like NAME=VALUE, such as trial=1. Found 'trial'"),
        ({"algorithm": "SANDMusk"}, "SANDMask"),
        ({"algorithm": "ANDMask"}, "--only algorithm=ANDMask leaves no runs"),
    ],
)
def test_a_wrong_condition_is_named(only: object, message: str) -> None:
    with pytest.raises(SandmaskError, match=message):
        only_some(WHOLE, only)  # type: ignore[arg-type]


def test_a_later_call_trains_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"

    def call(*words: str) -> str:
        result = CliRunner().invoke(app, ["sweep", words[0], str(folder), *words[1:]])
        assert result.exit_code == 0, result.output
        return result.output

    def counts() -> tuple[int, int]:
        status = Sweep.read(folder).status()
        return status.done, status.planned

    request = ("--datasets", "DebugVector", "--algorithms", "ERM,SANDMask", "--test-envs", "0", "--n-hparams", "1")
    whole = (*request, "--n-trials", "2", "--steps", "3", "--hparam", "mlp_width=8")
    assert json.loads(call("plan", *whole, "--no-calibrate", "--only", "trial=1", "--json"))["runs"] == 2
    said = call("run", *whole, "--workers", "1", "--only", "trial=1", "--only", "algorithm=ERM")
    assert "--only chooses 1 of the sweep's 4 runs" in said
    assert counts() == (1, 4)
    call("run", "--workers", "1")
    assert counts() == (4, 4)


def test_a_search_has_no_runs_to_choose_from(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match="does not work with --search"):
        sandmask.sweep(tmp_path, "DebugVector", "ERM", search="optuna", only={"trial": 0})
    assert not any(tmp_path.iterdir())
