"""A sweep that is killed, interrupted, or run twice at a time ends as one that was left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.parquet as pq
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.records import read_runs
from sandmask.records.testing import assert_same_runs

# Forks from a process that has imported everything: starting is cheap then, and that process has one thread.
SCRIPT = """
import multiprocessing, os, random, shutil, signal, sys, time
from pathlib import Path
import pyarrow.parquet
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, _job, expand, normalized, run_sweep
from sandmask.sweeps.executors import InlineExecutor

whole, killed, shared = (Path(sys.argv[1]) / name for name in ("whole", "killed", "shared"))
sweep = normalized(SweepSpec(
    ("DebugVector",), ("ERM", "SANDMask"), n_hparams=2, n_trials=2, steps=61, checkpoint_every=10,
    hparams={"mlp_width": 8, "mlp_depth": 3, "batch_size": 8, "tau": 0.3},
))
expansion, original = expand(sweep), _job.train_stack

both = multiprocessing.get_context("fork").Barrier(2)
met = []

def noted(specs, *args, **options):
    with shared.with_suffix(".log").open("a") as file:
        file.write("".join(f"{spec.id} {os.getpid()}\\n" for spec in specs))
    if not met:
        met.append(both.wait(timeout=120))  # neither may finish everything before the other has begun
    return original(specs, *args, **options)

def child(path):
    pid = os.fork()
    if pid:
        return pid
    if path == shared:
        _job.train_stack = noted
    folder = SweepFolder(path)
    folder.accept(sweep)
    options = JobOptions(str(path), device="cpu", checkpoint_seconds=0.03)
    run_sweep(folder, expansion, options, InlineExecutor, lambda specs: 4)
    os._exit(0)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert ended(child(whole)) == 0

moments, kills, longest = random.Random(1), 0, 0.25
while True:
    pid = child(killed)
    if kills < 20:
        time.sleep(moments.random() * longest)
        os.kill(pid, signal.SIGKILL)
    code = ended(pid)
    assert code in (0, -signal.SIGKILL), code
    if code == 0 and kills >= 20:
        break
    kills += code != 0
    if code == 0:  # a fast machine: over too soon
        shutil.rmtree(killed)
        kills, longest = 0, longest / 2

pids = [child(shared) for _ in range(2)]
assert [ended(pid) for pid in pids] == [0, 0]
"""


def check(folder: Path, whole: Path) -> None:
    """None lost, none twice, all the same to the last bit."""
    files = list((folder / "stacks").glob("*.records.parquet"))
    stored = Counter(run for file in files for run in pq.read_table(file, columns=["run"])["run"].to_pylist())
    expected = read_runs(whole)
    assert stored == {run.spec.id: 1 for run in expected}
    assert {run.status for run in expected} == {"done"}
    assert_same_runs(read_runs(folder), expected)
    left = {path.name.split(".", 1)[1] for path in (folder / "stacks").glob("[!.]*")}
    assert left == {"records.parquet", "progress.json"}


def test_killed_twenty_times_and_run_side_by_side(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, killed, shared = tmp_path / "whole", tmp_path / "killed", tmp_path / "shared"
    check(killed, whole)
    check(shared, whole)
    trained = [line.split() for line in shared.with_suffix(".log").read_text().splitlines()]
    assert max(Counter(run for run, _ in trained).values()) == 1  # no run was trained by both
    assert len({pid for _, pid in trained}) == 2  # and both had some


def test_ctrl_c_saves_and_the_same_command_goes_on(start_program: Callable[..., BaseProcess], tmp_path: Path) -> None:
    folder, said = tmp_path / "sweep", tmp_path / "stderr"
    options = "--device cpu --datasets DebugVector --algorithms ERM --n-hparams 1 --n-trials 1 --steps 1500"
    small = "--checkpoint-every 500 --hparam mlp_width=8 --hparam batch_size=8 --no-calibrate"
    command = ["sweep", "run", str(folder), *f"{options} {small}".split()]
    process = start_program(*command, stderr=said)
    while process.exitcode is None and not any(
        json.loads(path.read_text())["done"] for path in (folder / "stacks").glob("[!.]*.progress.json")
    ):
        time.sleep(0.05)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join()
    assert process.exitcode == 130, said.read_text()
    assert "Rerun the same command to continue" in said.read_text()
    assert list((folder / "stacks").glob("*.checkpoint.safetensors"))
    again = CliRunner().invoke(app, [*command, "--workers", "1"])
    assert again.exit_code == 0, again.stderr
    assert "3/3 runs done" in again.stdout
    assert len(read_runs(folder)) == 3
