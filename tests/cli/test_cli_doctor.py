import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sandmask
from sandmask.cli import _app, _checks, doctor
from sandmask.cli.doctor import Finding, note, ok, problem
from sandmask.datasets.sources import SOURCES

runner = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home and working folder, and no settings of this machine's user."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path), "SHELL": "/bin/zsh", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SANDMASK_DATA", "SANDMASK_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def status_of(findings: Iterator[Finding] | list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


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


def test_text_has_a_line_each_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [ok("fine", "all right"), note("so so", "could be better", "do this"), problem("bad", "broken", "mend it")]
    monkeypatch.setattr(doctor, "_checks", lambda *_, **__: {"Topic": lambda: found})
    result = runner.invoke(_app.app, ["doctor"], env={"COLUMNS": "100"})
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines == [
        ["Topic"],
        ["ok", "fine", "all", "right"],
        ["note", "so", "so", "could", "be", "better", "->", "do", "this"],
        ["PROBLEM", "bad", "broken", "->", "mend", "it"],
        [],
        ["1", "problem,", "1", "note."],
    ]


def test_a_check_that_fails_is_a_problem_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[Finding]:
        yield ok("first", "fine")
        raise OSError("libcuda is gone\nat line 3")

    monkeypatch.setattr(doctor, "_checks", lambda *_, **__: {"One": fails, "Two": lambda: [ok("second", "fine")]})
    result = runner.invoke(_app.app, ["doctor"])
    assert result.exit_code == 1
    assert "OSError: libcuda is gone" in result.stdout
    assert "second" in result.stdout


def test_data_that_is_there_is_found(tmp_path: Path) -> None:
    for domain in SOURCES["PACS"].counts:
        (tmp_path / "data" / "PACS" / domain / "dog").mkdir(parents=True)
    found = status_of(_checks.data(None))
    assert (found["folder"], found["PACS"], found["VLCS"]) == ("ok", "ok", "note")
    assert status_of(_checks.data(tmp_path / "nowhere"))["folder"] == "note"


def test_a_plugin_that_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(_checks.plugins()) == {"plugins": "ok"}
    (tmp_path / "mine.py").write_text("1 / 0")
    monkeypatch.setenv("SANDMASK_PLUGINS", str(tmp_path / "mine.py"))
    (finding,) = _checks.plugins()
    assert finding.status == "problem"
    assert "line 1" in finding.says


def test_weights_in_the_cache_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached, status in ((False, "note"), (True, "ok")):
        monkeypatch.setattr("sandmask.networks._timm.is_cached", lambda _, cached=cached: cached)
        assert status_of(_checks.weights()) == {"resnet50.tv_in1k": status}


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(_checks.disk(tmp_path / "a" / "b", tmp_path))["runs"] == "ok"
    (tmp_path / "file").write_text("")
    for below in ("file", "file/runs"):
        assert status_of(_checks.disk(tmp_path / below, tmp_path))["runs"] == "problem"

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    (finding, *_) = _checks.disk(tmp_path, tmp_path)
    assert finding.status == "problem"
    assert "Permission denied" in finding.says


@pytest.mark.parametrize(("gibibytes", "status"), [(0.5, "problem"), (5, "note"), (50, "ok")])
def test_room(gibibytes: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": gibibytes * 2**30})())
    found = status_of(_checks.disk(tmp_path, tmp_path))
    assert (found["room for runs"], found["room for data"]) == (status, status)


def test_completion_is_looked_for_where_typer_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(_checks.completion()) == {"completion": "note"}
    (tmp_path / ".zfunc").mkdir()
    (tmp_path / ".zfunc" / "_sandmask").touch()
    assert status_of(_checks.completion()) == {"completion": "ok"}
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert status_of(_checks.completion()) == {"completion": "note"}


def test_packages_that_are_missing_or_too_old_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _checks._dependencies().status == "ok"
    requires = ["numpy>=1.26", "pandas>=2.2,<4", "torch>=2.7", "typer", "submitit>=1.5.2; extra == 'slurm'"]
    monkeypatch.setattr(metadata, "requires", lambda _: requires)
    assert _checks._required("") == {"numpy": "1.26", "pandas": "2.2", "torch": "2.7", "typer": "0"}
    assert _checks._required("slurm") == {"submitit": "1.5.2"}
    versions = {"torch": "2.6.1+cu124", "pandas": None, "numpy": "10.0.0rc1"}
    monkeypatch.setattr(_checks, "_version", lambda name: versions.get(name, "1000"))
    assert _checks._dependencies().says == "pandas is not installed; torch 2.6.1+cu124 is older than 2.7"
    assert _checks._python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert _checks._python().status == "problem"


def test_masks_that_compute_something_else_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandmask, "ANDMask", lambda tau: lambda _: torch.zeros(2))
    assert _checks._masks().status == "problem"


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _checks._threads(cores).status == "ok"
    assert _checks._threads(cores + 1).advice == f"export OMP_NUM_THREADS={cores}"
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert _checks._threads(0).status == "note"


def test_an_unused_gpu_is_a_problem_and_none_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert _checks._no_gpu().status == "note"
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA_VISIBLE_DEVICES" in str(_checks._no_gpu().advice)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in _checks._no_gpu().says


def test_a_gpu_that_does_not_compute_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> tuple[int, int]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    finding = _checks._gpu(torch.device("cuda", 0))
    assert finding.status == "problem"
    assert "no kernel image" in finding.says


def test_a_missing_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert _checks._compiler().status == "note"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("CXX", "my-compiler")
    assert "my-compiler" in _checks._compiler().says


def test_compilation_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CppCompileError: no g++")

    monkeypatch.setattr(torch, "compile", fail)
    assert _checks._compile(torch.device("cpu")).status == "note"
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: function(x) + 1)
    assert _checks._compile(torch.device("cpu")).status == "problem"
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert _checks._compile(torch.device("cpu")).status == "ok"


def test_every_extra_names_its_packages_or_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"vision", "report", "ray", "slurm", "optuna", "tensorboard", "export", "wandb", "mlflow", "huggingface"}
    assert named == set(status_of(_checks.extras()))
    monkeypatch.setattr(_checks, "_version", lambda name: None if name == "timm" else "1000")
    found = {finding.name: finding for finding in _checks.extras()}
    assert found["vision"] == note("vision", "timm is not installed", "pip install --upgrade 'sandmask[vision]'")
    assert found["slurm"] == ok("slurm", "submitit 1000")


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._slurm().status == "note"

    def command(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    command("squeue", "echo 'squeue: error: cannot contact the controller' >&2; exit 1")
    assert doctor._slurm().says == "sbatch, scancel not found"
    command("sbatch", "")
    command("scancel", "")
    assert "cannot contact the controller" in doctor._slurm().says
    command("squeue", "exit 0")
    assert doctor._slurm() == ok("Slurm", "answers")
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert doctor._slurm().advice == "pip install 'sandmask[slurm]'"


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert "head:6379" in doctor._ray().says
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert doctor._ray().advice == "pip install 'sandmask[ray]'"


def test_workers_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert doctor._mps().advice == "nvidia-cuda-mps-control -d"
    (tmp_path / "control").touch()
    assert doctor._mps().status == "ok"


def test_the_gpu_of_a_mac_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert _checks._no_gpu().advice == "try it with --device mps"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_and_compiles() -> None:
    found = status_of(_checks.devices())
    assert found["GPU 0"] in ("ok", "note")
    assert found["Triton"] == "ok"
    assert found["torch.compile"] == "ok"
