"""A run in several processes that are killed or told to stop: it stops as a whole, and goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sandmask.training.checkpoint import load_checked

Start = Callable[..., BaseProcess]
ARGUMENTS = (
    *("train", "DebugVector", "SANDMask", "--test-env", "b", "--checkpoint-every", "10", "--device", "cpu"),
    *("--hparam", "tau=0.1", "--hparam", "dropout=0.1", "--hparam", "mlp_width=16", "--hparam", "batch_size=16"),
)
# So many steps that it cannot be over before the signal, and no checkpoint but the one at the end.
ENDLESS = ("--steps", "900000", "--checkpoint-seconds", "1000")
LOST = "error: Another process of this run has stopped or does not answer. Rerun the same command to continue"
SAVED = "Stopped. The run is saved in {}. Rerun the same command to continue."


def start_all(start_program: Start, store: TCPStore, out: Path, *arguments: str) -> list[BaseProcess]:
    """Two processes, told what torchrun tells; what they print on stderr goes to `<out>.<rank>`."""
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    told["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is torchrun's, and outlives the processes
    files = [out.with_suffix(f".{rank}") for rank in range(2)]
    given = (*ARGUMENTS, *arguments, "--out", str(out))
    return [start_program(*given, stderr=file, told={**told, "RANK": str(r)}) for r, file in enumerate(files)]


def said(out: Path) -> list[str]:
    """The lines of all processes, without those of progress."""
    lines = [line for rank in range(2) for line in out.with_suffix(f".{rank}").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("SANDMask: step")]


def wait_for_evaluations(out: Path, running: Callable[[], bool], count: int = 2) -> None:
    records = out / "records.jsonl"
    while running() and not (records.exists() and records.read_bytes().count(b'"eval"') >= count):
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("number", "whom", "statuses", "line"),
    [
        (signal.SIGTERM, 1, [143, 143], "terminated"),
        (signal.SIGINT, 0, [130, 130], "interrupted"),
        (signal.SIGKILL, 1, [2, -signal.SIGKILL], ""),
    ],
)
def test_what_stops_one_process_stops_all(
    start_program: Start, tmp_path: Path, number: signal.Signals, whom: int, statuses: list[int], line: str
) -> None:
    out = tmp_path / "run"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = start_all(start_program, store, out, *ENDLESS)
    wait_for_evaluations(out, lambda: all(process.exitcode is None for process in processes))
    os.kill(processes[whom].pid or 0, number)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == statuses
    if line:
        assert sorted(said(out)) == sorted([SAVED.format(out), line])
    else:
        (only,) = said(out)
        assert only.startswith(LOST)
    assert sorted(file.name for file in out.iterdir()) == ["checkpoint.safetensors", "records.jsonl"]


def test_a_killed_torchrun_goes_on_in_one_process(start_program: Start, tmp_path: Path) -> None:
    """The real command, once: starting it takes seconds."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = ("--steps", "201", "--checkpoint-seconds", "0.05")
    process = start_program(*ARGUMENTS, *steps, "--out", str(whole))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*torchrun, "-m", "sandmask", *ARGUMENTS, *steps, "--out", str(parts))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        wait_for_evaluations(parts, lambda: agent.poll() is None)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        errors = agent.communicate(timeout=60)[1]
    assert agent.returncode == 1
    assert len(re.findall("^error: ", errors, re.MULTILINE)) == 1
    assert LOST in errors
    assert "torch.distributed.DistBackendError" not in errors
    assert not (parts / "model.safetensors").exists()
    again = start_program(*ARGUMENTS, *steps, "--out", str(parts))
    for each in (process, again):
        each.join(60)
        assert each.exitcode == 0
    (_, expected), (_, found) = (load_checked(folder / "model.safetensors") for folder in (whole, parts))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
