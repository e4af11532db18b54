"""The program around its commands: interrupts while it starts, and output that is closed, full or ASCII only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.records import write_archive
from sandmask.records.testing import made_up_run

ENV = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}


def test_an_interrupt_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    result = subprocess.run(
        [sys.executable, "-m", "sandmask", "--version"],
        capture_output=True,
        text=True,
        env={**ENV, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (130, "\ninterrupted\n")


def test_an_interrupt_that_torch_swallows_while_it_is_imported_ends_the_program(tmp_path: Path) -> None:
    swallows = "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(swallows)
    result = subprocess.run(
        [sys.executable, "-m", "sandmask", "list", "algorithms"],
        capture_output=True,
        text=True,
        env={**ENV, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (130, "\ninterrupted\n")


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "sandmask"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
        timeout=60,
    )
    os.close(writer)
    assert result.stderr == ""


def test_a_full_output_is_named(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "sandmask", "--version"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENV, timeout=60)
    assert (result.returncode, result.stderr) == (2, "error: standard output: No space left on device.\n")
    write_archive([made_up_run([[0.5, 0.5]])], tmp_path / "a.records.parquet")
    written = CliRunner().invoke(app, ["report", str(tmp_path), "--output", "/dev/full"])
    assert written.stderr == "error: /dev/full: No space left on device.\n"


def test_closed_output_is_no_reason_to_stop(tmp_path: Path) -> None:
    words = f"train DebugVector ERM --test-env a --steps 1 --hparam batch_size=4 --device cpu --out {tmp_path}"
    result = subprocess.run(
        ["sh", "-c", f'"$0" -m sandmask {words} >&- 2>&-', sys.executable], capture_output=True, env=ENV, timeout=60
    )
    assert result.returncode == 0
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("log", ["closed", "full"])
def test_a_run_goes_on_when_nobody_reads_its_progress(log: str, tmp_path: Path) -> None:
    reader, writer = (
        os.pipe() if log == "closed" else (os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    )
    os.close(reader)
    words = f"train DebugVector SANDMask --test-env a --steps 1 --hparam batch_size=4 --device cpu --out {tmp_path}"
    command = [sys.executable, "-m", "sandmask", *words.split()]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, env=ENV, timeout=60)
    os.close(writer)
    assert result.returncode == 0
    assert b"records and model" in result.stdout


def test_a_terminal_that_knows_only_ascii_is_no_reason_to_stop() -> None:
    narrow = {**ENV, "PYTHONIOENCODING": "ascii", "COLUMNS": "50"}  # where long names end in an ellipsis
    words = [sys.executable, "-m", "sandmask", "train", "--help"]
    result = subprocess.run(words, capture_output=True, env=narrow, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"--test?" in result.stdout
