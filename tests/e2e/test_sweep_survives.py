"""A sweep that is killed, interrupted, or run twice at a time ends as one that was left alone."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from sandmask.records import read_runs

# Forks from a process that has imported everything: starting is cheap then, and that process has one thread.
SCRIPT = """
import multiprocessing, os, random, shutil, signal, sys, time
from pathlib import Path
import pyarrow.parquet
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, _job, expand, normalized, run_sweep
from sandmask.sweeps.executors import InlineExecutor

mode, path, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sweep = normalized(SweepSpec(
    ("DebugVector",), ("ERM", "SANDMask"), n_hparams=2, n_trials=2, steps=61, checkpoint_every=10,
    hparams={"mlp_width": 8, "mlp_depth": 3, "batch_size": 8, "tau": 0.3},
))
folder, expansion, original = SweepFolder(path), expand(sweep), _job.train_stack

both = multiprocessing.get_context("fork").Barrier(2)
met = []

def noted(specs, *args, **options):
    with log.open("a") as file:
        file.write("".join(f"{spec.id} {os.getpid()}\\n" for spec in specs))
    if mode == "two" and not met:
        met.append(both.wait(timeout=120))  # neither may finish everything before the other has begun
    return original(specs, *args, **options)

def child():
    pid = os.fork()
    if pid:
        return pid
    _job.train_stack = noted
    folder.accept(sweep)
    options = JobOptions(str(path), device="cpu", checkpoint_seconds=0.03)
    run_sweep(folder, expansion, options, InlineExecutor, lambda specs: 4)
    os._exit(0)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

if mode == "kill":
    moments, kills, longest = random.Random(1), 0, 0.25
    while True:
        pid = child()
        if kills < 20:
            time.sleep(moments.random() * longest)
            os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        assert code in (0, -signal.SIGKILL), code
        if code == 0 and kills >= 20:
            break
        kills += code != 0
        if code == 0:  # a fast machine: over too soon
            shutil.rmtree(path)
            kills, longest = 0, longest / 2
    print(kills)
else:
    pids = [child() for _ in range(2 if mode == "two" else 1)]
    assert [ended(pid) for pid in pids] == [0] * len(pids)
"""


def sweep(mode: str, folder: Path) -> str:
    command = [sys.executable, "-c", SCRIPT, mode, str(folder), str(folder.with_suffix(".log"))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check(folder: Path, whole: Path) -> None:
    """None lost, none twice, all the same to the last bit."""
    files = list((folder / "stacks").glob("*.records.parquet"))
    stored = Counter(run for file in files for run in pq.read_table(file, columns=["run"])["run"].to_pylist())
    expected = {run.spec.id: run for run in read_runs(whole)}
    assert stored == dict.fromkeys(expected, 1)
    for run in read_runs(folder):
        other = expected[run.spec.id]
        assert run.status == other.status == "done"
        assert np.array_equal(run.accuracy_in, other.accuracy_in)
        assert np.array_equal(run.accuracy_out, other.accuracy_out)
        assert np.array_equal(run.metrics["loss"], other.metrics["loss"])
    left = {path.name.split(".", 1)[1] for path in (folder / "stacks").glob("[!.]*")}
    assert left == {"records.parquet", "progress.json"}


def test_killed_twenty_times_and_run_side_by_side(tmp_path: Path) -> None:
    whole, killed, shared = tmp_path / "whole", tmp_path / "killed", tmp_path / "shared"
    sweep("one", whole)
    assert int(sweep("kill", killed)) >= 20
    check(killed, whole)
    sweep("two", shared)
    check(shared, whole)
    trained = [line.split() for line in shared.with_suffix(".log").read_text().splitlines()]
    assert max(Counter(run for run, _ in trained).values()) == 1  # no run was trained by both
    assert len({pid for _, pid in trained}) == 2  # and both had some


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    command = [
        *(sys.executable, "-m", "sandmask", "sweep", "run", str(folder), "--device", "cpu"),
        *("--datasets", "DebugVector", "--algorithms", "ERM", "--n-hparams", "1", "--n-trials", "1"),
        *("--steps", "1500", "--checkpoint-every", "500", "--hparam", "mlp_width=8", "--hparam", "batch_size=8"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(
        json.loads(path.read_text())["done"] for path in (folder / "stacks").glob("[!.]*.progress.json")
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "Rerun the same command to continue" in stderr
    assert list((folder / "stacks").glob("*.checkpoint.safetensors"))
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "3/3 runs done" in again.stdout
    assert len(read_runs(folder)) == 3
