"""The script that trains a sweep piece by piece, each time from the archive alone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandmask.records import read_runs

SCRIPT = Path(__file__).parents[1] / "results" / "continue.sh"
TINY = """
datasets = ["DebugVector"]
algorithms = ["ERM"]
n_hparams = 2
n_trials = 1
steps = 4
checkpoint_every = 2
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def start(folder: Path, seconds: int, *options: str) -> subprocess.Popen[str]:
    shutil.copy(SCRIPT, folder)
    (folder / "tiny.toml").write_text(TINY)
    (folder / "copy").mkdir(exist_ok=True)
    source = SCRIPT.parents[1] / "src"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(source), "COPY": str(folder / "copy")}
    command = ["bash", SCRIPT.name, "tiny.toml", str(seconds), "kept/tiny.records.parquet", "--device", "cpu"]
    return subprocess.Popen(
        [*command, "--workers", "1", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def go(folder: Path, seconds: int, *options: str) -> tuple[int, str]:
    process = start(folder, seconds, *options)
    said = process.communicate()[0]
    return process.returncode, said


def test_a_sweep_goes_on_from_its_archive(tmp_path: Path) -> None:
    archive, copy = (tmp_path / name / "tiny.records.parquet" for name in ("kept", "copy"))

    status, said = go(tmp_path, 600, "--test-envs", "0")
    assert status == 0, said
    assert len(read_runs(archive)) == len(read_runs(copy)) == 2

    shutil.rmtree(tmp_path / "runs")  # another machine
    status, said = go(tmp_path, 600)
    assert status == 0, said
    assert "2/6 runs done; records in" in said
    assert len(read_runs(archive)) == len(read_runs(copy)) == 6


def test_a_signal_saves_a_checkpoint_and_its_status_is_kept(tmp_path: Path) -> None:
    process = start(tmp_path, 600, "--steps", "900000", "--checkpoint-every", "900000")
    stacks = tmp_path / "runs" / "tiny" / "stacks"
    while not any('"done": 0' not in path.read_text() for path in stacks.glob("[!.]*.progress.json")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert list(stacks.glob("*.checkpoint.safetensors"))
    assert not list((tmp_path / "kept").iterdir())  # no run is finished
