"""A run killed at random moments and started again ends as an uninterrupted one, to the bit."""

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

Start = Callable[..., BaseProcess]
ARGUMENTS = (
    *("train", "DebugVector", "SANDMask", "--test-env", "b", "--steps", "301", "--checkpoint-every", "10"),
    *("--hparam", "tau=0.1", "--hparam", "dropout=0.1", "--hparam", "mlp_width=16", "--hparam", "batch_size=16"),
    *("--checkpoint-seconds", "0.05", "--device", "cpu"),
)


def evaluations(folder: Path) -> int:
    records = folder / "records.jsonl"
    return records.read_bytes().count(b'"eval"') if records.exists() else 0


def test_killed_again_and_again(start_program: Start, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = start_program(*ARGUMENTS, "--out", str(whole))
    process.join()
    assert process.exitcode == 0
    moments = random.Random(0)
    kills = 0
    while True:
        process = start_program(*ARGUMENTS, "--out", str(parts))
        # Wait until the run has come a little further, then kill it somewhere in the steps that follow.
        goal = evaluations(parts) + moments.randrange(1, 6)
        while process.exitcode is None and evaluations(parts) < goal:
            time.sleep(0.002)
        process.join(moments.random() * 0.03)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    for file in ("records.jsonl", "model.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_continue(
    start_program: Start, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    # So many steps that it cannot be over before the signal, and no checkpoint but the one that the signal asks for.
    endless = ("--steps", "900000", "--checkpoint-seconds", "1000", "--json")
    run, said = tmp_path / "run", tmp_path / "stderr"
    process = start_program(*ARGUMENTS, *endless, "--out", str(run), stderr=said)
    while process.exitcode is None and evaluations(run) < 2:
        time.sleep(0.002)
    os.kill(process.pid or 0, number)
    process.join()
    assert process.exitcode == status
    assert f"The run is saved in {run}. Rerun the same command to continue." in said.read_text()
    assert (run / "checkpoint.safetensors").exists()
