"""A run killed at random moments and started again ends as an uninterrupted one, to the bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ARGUMENTS = (
    *("train", "DebugVector", "SANDMask", "--test-env", "b", "--steps", "301", "--checkpoint-every", "10"),
    *("--hparam", "tau=0.1", "--hparam", "dropout=0.1", "--hparam", "mlp_width=16", "--hparam", "batch_size=16"),
    *("--checkpoint-seconds", "0.05", "--device", "cpu"),
)


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sandmask", *ARGUMENTS, "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def evaluations(folder: Path) -> int:
    records = folder / "records.jsonl"
    return records.read_bytes().count(b'"eval"') if records.exists() else 0


def test_killed_again_and_again(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(whole).wait() == 0
    moments = random.Random(0)
    kills = 0
    while True:
        process = start(parts)
        # Wait until the run has come a little further, then kill it somewhere in the steps that follow.
        goal = evaluations(parts) + moments.randrange(1, 6)
        while process.poll() is None and evaluations(parts) < goal:
            time.sleep(0.002)
        try:
            process.wait(timeout=moments.random() * 0.03)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        if process.returncode == 0:
            break
    assert kills >= 3
    for file in ("records.jsonl", "model.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_continue(tmp_path: Path, number: signal.Signals, status: int) -> None:
    # So many steps that it cannot be over before the signal, and no checkpoint but the one that the signal asks for.
    endless = ("--steps", "900000", "--checkpoint-seconds", "1000", "--json")
    command = [sys.executable, "-m", "sandmask", *ARGUMENTS, *endless, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and evaluations(tmp_path) < 2:
        time.sleep(0.002)
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == status
    assert f"The run is saved in {tmp_path}. Rerun the same command to continue." in stderr
    assert (tmp_path / "checkpoint.safetensors").exists()
