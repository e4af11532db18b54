"""`sandmask.sweep`: the command's records, tables, extension, resumption, workers, and mistakes in one line."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sandmask
from sandmask.algorithms import ALGORITHMS
from sandmask.api import Sweep
from sandmask.api._progress import _plain
from sandmask.api._sweep_arguments import device_of_workers
from sandmask.cli._app import app
from sandmask.records import read_runs
from sandmask.sweeps import StackStatus, SweepStatus
from sandmask.sweeps import _job as job_module
from sandmask.sweeps.executors import EXECUTORS, InlineExecutor
from sandmask.training import train_stack
from sandmask.training.precision import sweep_precision

ASKED: dict[str, Any] = {
    "datasets": "DebugVector",
    "algorithms": ["ERM", "SANDMask"],
    "test_envs": ["b"],
    "n_hparams": 2,
    "n_trials": 1,
    "steps": 5,
    "checkpoint_every": 2,
    "hparams": {"mlp_width": 8, "batch_size": 8},
}
HERE: dict[str, Any] = {"device": "cpu", "workers": 1, "calibrate": False}


def curves(folder: Path) -> dict[str, list[Any]]:
    return {
        run.spec.id: [run.status, *map(np.ndarray.tolist, (run.steps, run.accuracy_in, run.metrics["loss"]))]
        for run in read_runs(folder)
    }


def test_the_same_records_as_the_command_and_either_continues_the_other(tmp_path: Path) -> None:
    swept = sandmask.sweep(tmp_path / "call", **ASKED, **HERE)
    assert (len(swept.runs), swept.trained, dict(swept.failed)) == (4, 4, {})
    words = ["--datasets", "DebugVector", "--algorithms", "ERM,SANDMask", "--test-envs", "b", "--n-hparams", "2"]
    words += ["--n-trials", "1", "--steps", "5", "--checkpoint-every", "2", "--hparam", "mlp_width=8"]
    words += ["--hparam", "batch_size=8", "--device", "cpu", "--workers", "1", "--json"]
    done = CliRunner().invoke(app, ["sweep", "run", str(tmp_path / "command"), *words])
    assert done.exit_code == 0, done.output
    assert curves(tmp_path / "call") == curves(tmp_path / "command")
    assert sandmask.sweep(tmp_path / "command", **ASKED, **HERE).trained == 0
    assert "Nothing to do" in CliRunner().invoke(app, ["sweep", "run", str(tmp_path / "call"), *words[:-1]]).stdout


def test_results_are_frames_and_more_extends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = sandmask.sweep(tmp_path, **ASKED, **HERE)
    assert capsys.readouterr() == ("", "")
    assert len(swept.records()) == 4
    assert len(swept.frame()) == 4 * 3 * 3
    assert list(swept.table().index) == [("DebugVector", "ERM"), ("DebugVector", "SANDMask")]
    assert list(swept.table().columns) == ["training-domain", "oracle"]
    assert "4/4 runs done" in swept._repr_html_()
    report = swept.report("oracle")
    assert [rule.rule for rule in report.rules] == ["oracle"]
    work = json.loads((tmp_path / "work.json").read_text())["runs"]
    assert work.keys() == {run.id for run in swept.runs}
    more = sandmask.sweep(tmp_path, n_hparams=3, **HERE)
    assert (len(more.runs), more.trained) == (6, 2)
    assert Sweep.read(tmp_path).status().done == 6


def test_options_that_do_not_apply_to_finished_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**ASKED, **HERE, "progress": "lines", "diagnostics": True}
    sandmask.sweep(tmp_path / "runs", **asked)
    assert "finished runs are not changed" not in capsys.readouterr().err
    sandmask.sweep(tmp_path / "runs", **asked, log=["tensorboard:" + str(tmp_path / "log")])
    note = "note: finished runs are not changed: --diagnostics and --log cannot be added to them."
    assert note in capsys.readouterr().err
    sandmask.sweep(tmp_path / "runs", **{**asked, "diagnostics": False})
    assert "finished runs are not changed" not in capsys.readouterr().err


def test_a_plan_is_a_frame_and_writes_nothing(tmp_path: Path) -> None:
    plan = sandmask.plan_sweep(tmp_path / "sweep", **ASKED, device="cpu", calibrate=False)
    assert (plan.runs, plan.done, plan.seconds) == (4, 0, None)
    assert plan.frame()["runs"].sum() == 4
    assert plan.memory_bytes > 0
    assert "4 missing" in plan._repr_html_()
    assert not (tmp_path / "sweep").exists()


def test_an_interrupted_sweep_continues_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandmask.sweep(tmp_path / "whole", **ASKED, **HERE)

    def interrupted(specs: Any, *arguments: Any, on_progress: Any, **named: Any) -> Any:
        def stop(progress: Any) -> None:
            on_progress(progress)
            if progress.done >= 3:
                raise KeyboardInterrupt

        return train_stack(specs, *arguments, on_progress=stop, **named)

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "train_stack", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            sandmask.sweep(tmp_path / "part", **ASKED, **HERE)
    assert "Rerun the same command to continue" in caught.value.__notes__[0]
    assert list((tmp_path / "part" / "stacks").glob("*.checkpoint.safetensors"))
    sandmask.sweep(tmp_path / "part", **ASKED, **HERE)
    assert curves(tmp_path / "part") == curves(tmp_path / "whole")


def test_worker_processes_do_not_run_the_script_that_starts_them(tmp_path: Path) -> None:
    script = tmp_path / "without_guard.py"
    script.write_text(
        textwrap.dedent("""
        from sandmask.sweeps.executors import WorkerExecutor
        print("started")
        with WorkerExecutor(1) as executor:
            print(executor.submit(pow, 2, 5).result())
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["started", "32"]


@pytest.fixture
def own_algorithm(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("_entries", "_modules"):
        monkeypatch.setattr(ALGORITHMS, name, dict(getattr(ALGORITHMS, name)))
    return ALGORITHMS.register(replace(ALGORITHMS["ERM"], name="OfThisProgram")).name


def test_what_the_program_registers_trains_in_its_process(
    own_algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**ASKED, "algorithms": own_algorithm, **HERE, "workers": 2}
    swept = sandmask.sweep(tmp_path, **asked, progress="lines")
    assert (swept.trained, dict(swept.failed)) == (2, {})
    assert "note: OfThisProgram: registered by this program" in capsys.readouterr().err


def test_runs_that_cannot_be_trained_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise sandmask.SandmaskError("no such luck")

    monkeypatch.setattr(job_module, "train_stack", broken)
    swept = sandmask.sweep(tmp_path, **ASKED, **HERE)
    assert set(swept.failed.values()) == {"no such luck"}
    assert "4 runs not trained: no such luck" in capsys.readouterr().err
    assert "Not trained: 4 runs" in swept._repr_html_()


def test_several_devices_are_dealt_to_workers(tmp_path: Path) -> None:
    swept = sandmask.sweep(tmp_path, **ASKED, device="cpu,cpu", calibrate=False)
    assert (swept.trained, swept.failed) == (4, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datasets": None}, "name its datasets"),
        ({"algorithms": "ERM,SANDMsk"}, "Did you mean 'SANDMask'?"),
        ({"test_envs": ["d"]}, "has no environment 'd'"),
        ({"n_trials": 0}, "n_trials should be at least 1"),
        ({"executor": "rey"}, "Did you mean 'ray'?"),
        ({"slurm": {"partition": "x"}}, "needs --executor slurm"),
        ({"ray_address": "auto"}, "needs --executor ray"),
        ({"ray_address": "auto", "executor": "slurm"}, "needs --executor ray"),
        ({"gpus_per_worker": 0.5}, "are for --executor ray and slurm"),
        ({"cpus_per_worker": 2}, "are for --executor ray and slurm"),
        ({"workers": 0}, "workers should be at least 1"),
        ({"device": ","}, "Device ',' cannot be used here"),
        ({"device": "cuda:0,cuda:1", "executor": "slurm"}, "Device 'cuda:0,cuda:1' cannot be used here"),
        ({"progress": "loud"}, "progress should be"),
    ],
)
def test_mistakes_are_the_messages_of_the_command(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(sandmask.SandmaskError) as caught:
        sandmask.sweep(tmp_path / "sweep", **{**ASKED, **HERE, **changes})
    assert message in str(caught.value)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_workers_elsewhere_may_have_devices_that_this_machine_lacks(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    class Elsewhere(InlineExecutor):
        def submit(self, fn: Any, job: job_module.Job) -> Any:  # type: ignore[override]
            asked.append(job.options.device)
            return super().submit(fn, replace(job, options=replace(job.options, device="cpu")))

    entry = replace(EXECUTORS[executor], build=lambda _: Elsewhere())
    monkeypatch.setattr(EXECUTORS, "_entries", {executor: entry})
    swept = sandmask.sweep(tmp_path, **ASKED, executor=executor, device="cuda:99")
    assert (swept.trained, dict(swept.failed)) == (4, {})
    assert set(asked) == {"cuda:99"}


@pytest.mark.parametrize("executor", ["ray", "slurm"])
@pytest.mark.parametrize("here", [False, True])
def test_the_precision_follows_the_devices_of_workers(
    executor: str, here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    for gpus, precision in ((0, "fp32"), (1, "fp32x3")):
        assert sweep_precision(device_of_workers(executor, None, gpus)) == precision
    assert sweep_precision(device_of_workers("local", None, 0)) == ("fp32x3" if here else "fp32")


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    sandmask.sweep(tmp_path, **{**ASKED, "n_hparams": 1, "algorithms": "ERM"}, **HERE)
    with pytest.raises(sandmask.SandmaskError, match="steps is 5 there, but 6 was requested"):
        sandmask.sweep(tmp_path, steps=6, **HERE)
    with pytest.raises(sandmask.SandmaskError, match="--only trains some of them"):
        sandmask.sweep(tmp_path, algorithms="IRM", **HERE)
    with pytest.raises(sandmask.SandmaskError, match="holds no sweep"):
        Sweep.read(tmp_path / "elsewhere")


def test_runs_on_files_that_have_changed_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for value in (0.0, 1.0):
        numbers = np.full((60, 3), value, dtype=np.float32)
        numbers[:, 0] += np.arange(60)
        arrays: dict[str, Any] = {"inputs": numbers, "class": np.arange(60) % 2, "domain": np.arange(60) % 3}
        np.savez(tmp_path / "scans.npz", **arrays)
        asked = {**ASKED, "datasets": tmp_path / "scans.npz", "test_envs": [0], "algorithms": "ERM"}
        swept = sandmask.sweep(tmp_path / "sweep", **asked, **HERE, progress="lines")
        assert swept.trained == 2
        said = capfd.readouterr().err
        assert ("note: the files of scans-" in said) == (value == 1.0)
    assert "have changed, so the sweep no longer includes 2 runs on it." in said


def test_names_in_the_view_are_not_markup() -> None:
    stack = StackStatus("s", "photos[/b]", "ERM", 1, 0, 10, 0.0, "cpu", "here", 0.0)
    assert "photos[/b] ERM  1 run  " in _plain(SweepStatus(1, 0, 1, 10, 0, 0.0, (stack,), ()))


def test_slow_and_starting_stacks_in_the_view() -> None:
    slow, new = (StackStatus("s", "PACS", "ERM", 1, 0, 10, rate, "cpu", "here", 0.0) for rate in (0.25, 0.0))
    lines = _plain(SweepStatus(3, 0, 2, 30, 0, 0.25, (slow, new), (), 100.0)).splitlines()
    assert lines[1] == "0/3 runs done, 2 running in 2 stacks, 0.25 run-steps/s, 2 min left"
    assert "0.25 run-steps/s" in lines[2]
    assert "starting" in lines[3]
    both = _plain(SweepStatus(2, 0, 2, 20, 0, 0.0, (new, new), ())).splitlines()
    assert both[1] == "0/2 runs done, 2 running in 2 stacks, starting"
