"""`sandmask.train`: the command's records, frames, resumption, and mistakes in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sandmask
from sandmask.api import Run
from sandmask.api._progress import TrainingBar
from sandmask.cli._app import app
from sandmask.records import read_runs
from sandmask.records.testing import assert_same_runs
from sandmask.training import Progress

SMALL: dict[str, Any] = {"hparams": {"mlp_width": 8, "batch_size": 8}, "device": "cpu", "checkpoint_every": 2}
OPTIONS = ("--hparam", "mlp_width=8", "--hparam", "batch_size=8", "--device", "cpu", "--checkpoint-every", "2")


def train(out: Path, **changes: Any) -> Run:
    return sandmask.train("DebugVector", "ANDMask", "b", **{**SMALL, "steps": 5, "out": out, **changes})


def test_the_same_run_as_the_command_to_the_bit(tmp_path: Path) -> None:
    run = train(tmp_path / "call")
    words = ["train", "DebugVector", "ANDMask", "--test-env", "b", "--steps", "5", *OPTIONS]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "command"), "--json"])
    assert done.exit_code == 0, done.output
    assert_same_runs([run.record], read_runs(tmp_path / "command"))


def test_results_are_frames(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert run.folder == tmp_path
    assert run.spec.algorithm == "ANDMask"
    assert list(run.accuracy.index) == ["a", "b", "c"]
    assert run.accuracy["held_out"].tolist() == [False, True, False]
    assert run.accuracy["out"].tolist() == run.record.accuracy_out[-1].tolist()
    frame = run.frame()
    assert len(frame) == len(run.record.steps) * 3
    assert set(frame["step"]) == {0, 2, 4}
    assert "ANDMask on DebugVector, after step 4" in run._repr_html_()
    assert "<td>True</td>" in run._repr_html_()
    curves = run._repr_html_().partition("<svg")[2].partition("</svg>")[0]
    lines = re.findall('<polyline points="(.*?)"', curves)
    assert [len(line.split()) for line in lines] == [3, 3]  # an evaluation each: validation, and held out
    validation = run.record.accuracy_out[-1, [0, 2]].mean()
    assert f"validation {validation:.1%}, held out: b {run.record.accuracy_in[-1, 1]:.1%}" in curves
    assert run.model().classes == run.record.classes
    assert sandmask.load_run(run).classes == run.record.classes
    assert sandmask.report(run).runs == 1


def test_it_shows_nothing_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    train(tmp_path / "lines", progress="lines")
    assert "ANDMask: step 5/5" in capsys.readouterr().err
    with pytest.raises(sandmask.SandmaskError, match="progress should be True, False or 'lines'"):
        train(tmp_path / "wrong", progress="bar")


def test_an_interrupted_run_continues_as_if_it_had_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole")

    def interrupt(_: TrainingBar, report: Progress) -> None:
        if report.done >= 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingBar, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "part")
    assert (tmp_path / "part" / "checkpoint.safetensors").exists()
    assert_same_runs([train(tmp_path / "part").record], [whole.record])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "DebugVektor"}, "Did you mean 'DebugVector'?"),
        ({"algorithm": "SANDMsk"}, "Did you mean 'SANDMask'?"),
        ({"test_env": "d"}, "has no environment 'd'"),
        ({"test_env": ["a", "b", "c"]}, "at least 1 environment to train on"),
        ({"hparams": {"lrr": 1}}, "Did you mean 'lr'?"),
        ({"device": "tpu9"}, "Device 'tpu9' cannot be used here"),
        ({"plugins": ["nowhere.py"]}, "There is no plugin file nowhere.py"),
    ],
)
def test_mistakes_are_the_messages_of_the_command(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"dataset": "DebugVector", "algorithm": "ERM", "test_env": "a", **SMALL}
    with pytest.raises(sandmask.SandmaskError) as caught:
        sandmask.train(**{**asked, "out": tmp_path / "run", **changes})
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    run = train(tmp_path, hparams={**SMALL["hparams"], "lr": 1e38})
    assert run.record.status == "diverged"
    assert "diverged at step" in run._repr_html_()
