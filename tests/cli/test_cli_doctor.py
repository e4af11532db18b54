import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import sandmask
from sandmask.cli import _app, _checks, _machine_checks
from sandmask.cli._checks import Say
from sandmask.datasets.sources import SOURCES
from sandmask.functional import random

runner = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home and working folder, and no settings of this machine's user."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path), "SHELL": "/bin/zsh", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SANDMASK_DATA", "SANDMASK_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


class Line(NamedTuple):
    status: str
    says: str
    advice: str | None = None


def examine(check: Callable[..., None], *arguments: Any) -> dict[str, Line]:
    """What a check says, by name."""
    lines: dict[str, Line] = {}

    def say(name: str, status: str, says: str, advice: str | None = None) -> None:
        assert name not in lines
        lines[name] = Line(status, says, advice)

    check(say, *arguments)
    return lines


def only(check: Callable[..., None], *arguments: Any) -> Line:
    """The one line of a check."""
    (line,) = examine(check, *arguments).values()
    return line


def test_json_has_every_topic_and_what_to_do(tmp_path: Path) -> None:
    result = runner.invoke(_app.app, ["doctor", "--json"])
    answer = json.loads(result.stdout)
    sick = [line for line in answer["findings"] if line["status"] == "problem"]
    assert (answer["healthy"], result.exit_code) == (not sick, 1 if sick else 0), sick
    topics = ["Installation", "Devices", "Extras", "Sweeps", "Data", "Pretrained weights", "Disk", "Terminal"]
    assert list(dict.fromkeys(line["topic"] for line in answer["findings"])) == topics
    by_name = {line["name"]: line for line in answer["findings"]}
    assert by_name["torch"] == {
        "topic": "Installation",
        "name": "torch",
        "status": "ok",
        "says": torch.__version__,
        "advice": None,
    }
    assert by_name["masks"]["status"] == "ok"
    assert by_name["PACS"]["advice"] == "sandmask data download PACS"
    assert by_name["completion"]["advice"] == "sandmask --install-completion"
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


TOPICS = ("installation", "extras", "data", "weights", "disk", "terminal")


def quiet(say: Say, **_: object) -> None:
    """A check that says nothing."""


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOPICS:
        monkeypatch.setattr(_checks, name, quiet)
    for name in ("devices", "executors"):
        monkeypatch.setattr(_machine_checks, name, quiet)


@pytest.mark.usefixtures("no_checks")
def test_text_has_a_line_each_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(say: Say) -> None:
        say("fine", "ok", "all right")
        say("so so", "note", "could be better", "do this")
        say("bad", "problem", "broken", "mend it")

    monkeypatch.setattr(_checks, "terminal", check)
    result = runner.invoke(_app.app, ["doctor"], env={"COLUMNS": "100"})
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[-6:] == [
        ["Terminal"],
        ["ok", "fine", "all", "right"],
        ["note", "so", "so", "could", "be", "better", "->", "do", "this"],
        ["PROBLEM", "bad", "broken", "->", "mend", "it"],
        [],
        ["1", "problem,", "1", "note."],
    ]


@pytest.mark.usefixtures("no_checks")
def test_a_check_that_fails_is_a_problem_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(say: Say) -> None:
        say("first", "ok", "fine")
        raise OSError("libcuda is gone\nat line 3")

    monkeypatch.setattr(_checks, "installation", fails)
    monkeypatch.setattr(_checks, "terminal", lambda say: say("second", "ok", "fine"))
    result = runner.invoke(_app.app, ["doctor"])
    assert result.exit_code == 1
    assert "stopped: OSError: libcuda is gone -> fix" in result.stdout
    assert "second" in result.stdout


@pytest.mark.usefixtures("no_checks")
def test_without_problems_the_exit_status_is_0() -> None:
    result = runner.invoke(_app.app, ["doctor"])
    assert result.exit_code == 0
    assert result.stdout.endswith("\nNo problems.\n")


def test_data_that_is_there_is_found(tmp_path: Path) -> None:
    for domain in SOURCES["PACS"].counts:
        (tmp_path / "data" / "PACS" / domain / "dog").mkdir(parents=True)
    found = examine(_checks.data, None)
    assert (found["folder"].status, found["PACS"].status, found["VLCS"].status) == ("ok", "ok", "note")
    assert examine(_checks.data, tmp_path / "nowhere")["folder"].status == "note"


def test_a_plugin_that_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(_checks.terminal)["plugins"] == Line("ok", "none")
    (tmp_path / "mine.py").write_text("1 / 0")
    monkeypatch.setenv("SANDMASK_PLUGINS", str(tmp_path / "mine.py"))
    line = examine(_checks.terminal)["plugins"]
    assert line.status == "problem"
    assert "line 1" in line.says


def test_weights_in_the_cache_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached, status in ((False, "note"), (True, "ok")):
        monkeypatch.setattr("sandmask.networks._timm.is_cached", lambda _, cached=cached: cached)
        assert examine(_checks.weights)["resnet50.tv_in1k"].status == status


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(_checks.disk, tmp_path / "a" / "b", tmp_path)["runs"].status == "ok"
    (tmp_path / "file").write_text("")
    for below in ("file", "file/runs"):
        assert examine(_checks.disk, tmp_path / below, tmp_path)["runs"].status == "problem"

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    line = examine(_checks.disk, tmp_path, tmp_path)["runs"]
    assert line.status == "problem"
    assert "Permission denied" in line.says


@pytest.mark.parametrize(("gibibytes", "status"), [(0.5, "problem"), (5, "note"), (50, "ok")])
def test_room(gibibytes: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": gibibytes * 2**30})())
    found = examine(_checks.disk, tmp_path, tmp_path)
    assert (found["room for runs"].status, found["room for data"].status) == (status, status)


def test_completion_is_looked_for_where_typer_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(_checks.terminal)["completion"].status == "note"
    (tmp_path / ".zfunc").mkdir()
    (tmp_path / ".zfunc" / "_sandmask").touch()
    assert examine(_checks.terminal)["completion"].status == "ok"
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert examine(_checks.terminal)["completion"].status == "note"


def set_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> None:
    """Versions of installed packages, None for one that is missing; others are new."""

    def version(name: str) -> str:
        found = versions.get(name, "1000")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_packages_that_are_missing_or_too_old_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(_checks.installation)
    assert (found["packages"].status, found["Python"].status) == ("ok", "ok")
    requires = ["numpy>=1.26", "pandas>=2.2,<4", "torch>=2.7", "typer", "submitit>=1.5.2; extra == 'slurm'"]
    monkeypatch.setattr(metadata, "requires", lambda _: requires)
    set_versions(monkeypatch, {"torch": "2.6.1+cu124", "pandas": None, "numpy": "10.0.0rc1", "submitit": "1.5.2"})
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    found = examine(_checks.installation)
    assert found["packages"].says == "pandas is not installed; torch 2.6.1+cu124 is older than 2.7"
    assert (found["packages"].status, found["Python"].status) == ("problem", "problem")
    assert examine(_checks.extras)["slurm"] == Line("ok", "submitit 1.5.2")


def test_masks_that_compute_something_else_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandmask, "ANDMask", lambda tau: lambda _: torch.zeros(2))
    assert examine(_checks.installation)["masks"].status == "problem"


def test_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def processor(threads: int, free: int | None = None) -> dict[str, Line]:
        return examine(_machine_checks._processor, threads, free)

    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processor(cores)["CPU"].status == "ok"
    assert processor(cores + 1)["CPU"].advice == f"export OMP_NUM_THREADS={cores}"
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert processor(0)["CPU"].status == "note"
    assert [processor(1, free)["memory"].status for free in (None, 2**30, 2**33)] == ["ok", "note", "ok"]


def test_an_unused_gpu_is_a_problem_and_none_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert only(_machine_checks._no_gpu).status == "note"
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA_VISIBLE_DEVICES" in str(only(_machine_checks._no_gpu).advice)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in only(_machine_checks._no_gpu).says


def test_a_source_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda **_: iter(()))
    found = examine(_checks.installation)
    assert found["packages"].status == "note"
    assert "is not installed" in found["packages"].says
    assert found["masks"].status == "ok"
    assert examine(_checks.extras) == {}


def test_a_gpu_that_does_not_compute_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> tuple[int, int]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    line = only(_machine_checks._gpu, torch.device("cuda", 0))
    assert line.status == "problem"
    assert "does not compute: RuntimeError: no kernel image" in line.says


def test_a_missing_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert only(_machine_checks._compiler).status == "note"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("CXX", "my-compiler")
    assert "my-compiler" in only(_machine_checks._compiler).says


def test_compilation_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CppCompileError: no g++")

    monkeypatch.setattr(torch, "compile", fail)
    assert only(_machine_checks._compile, torch.device("cpu")).status == "note"
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: function(x) + 1)
    assert only(_machine_checks._compile, torch.device("cpu")).status == "problem"
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert only(_machine_checks._compile, torch.device("cpu")).status == "ok"


def test_every_extra_names_its_packages_or_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"vision", "report", "ray", "slurm", "optuna", "tensorboard", "export", "wandb", "mlflow", "huggingface"}
    assert named == set(examine(_checks.extras))
    set_versions(monkeypatch, {"timm": None})
    found = examine(_checks.extras)
    assert found["vision"] == Line("note", "timm is not installed", "pip install --upgrade 'sandmask[vision]'")
    assert found["slurm"] == Line("ok", "submitit 1000")


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert only(_machine_checks._slurm).status == "note"

    def command(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    command("squeue", "echo 'squeue: error: cannot contact the controller' >&2; exit 1")
    assert only(_machine_checks._slurm).says == "sbatch, scancel not found"
    command("sbatch", "")
    command("scancel", "")
    assert "cannot contact the controller" in only(_machine_checks._slurm).says
    command("squeue", "exit 0")
    assert only(_machine_checks._slurm) == Line("ok", "answers")
    monkeypatch.setattr(_machine_checks, "find_spec", lambda _: None)
    assert only(_machine_checks._slurm).advice == "pip install 'sandmask[slurm]'"


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert "head:6379" in examine(_machine_checks.executors)["Ray"].says
    monkeypatch.setattr(_machine_checks, "find_spec", lambda _: None)
    assert examine(_machine_checks.executors)["Ray"].advice == "pip install 'sandmask[ray]'"


def test_workers_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_machine_checks, "_slurm", quiet)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert examine(_machine_checks.executors)["NVIDIA MPS"].advice == "nvidia-cuda-mps-control -d"
    (tmp_path / "control").touch()
    assert examine(_machine_checks.executors)["NVIDIA MPS"].status == "ok"


def test_the_gpu_of_a_mac_has_to_compute_the_random_numbers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    line = only(_machine_checks._no_gpu)  # torch has no MPS here
    assert (line.status, "does not compute" in line.says) == ("problem", True)
    cpu = torch.device("cpu")
    assert only(_machine_checks._apple_gpu, cpu).status == "note"
    numbers = iter((torch.zeros(1000), torch.ones(1000)))
    monkeypatch.setattr(random, "uniform", lambda *_: next(numbers))
    line = only(_machine_checks._apple_gpu, cpu)
    assert (line.status, "wrong numbers" in line.says) == ("problem", True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_and_compiles() -> None:
    found = examine(_machine_checks.devices)
    assert found["GPU 0"].status in ("ok", "note")
    assert found["Triton"].status == "ok"
    assert found["torch.compile"].status == "ok"
