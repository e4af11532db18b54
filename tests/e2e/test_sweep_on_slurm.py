"""A sweep on a real Slurm cluster of one node, which a fixture starts; skipped where Slurm is not installed."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from sandmask.errors import SandmaskError
from sandmask.records import read_runs
from sandmask.sweeps.executors import _slurm as slurm_module
from sandmask.sweeps.executors._slurm import LostJobError, SlurmExecutor

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Slurm's limits on submitted jobs need its accounting database. This refuses jobs with the same words.
LIMITED_SBATCH = """#!/bin/sh
limit=$(cat {folder}/limit 2>/dev/null)
if [ -n "$limit" ] && [ "$({squeue} --noheader | wc -l)" -ge "$limit" ]; then
  echo refused >> {folder}/refused
  echo "sbatch: error: AssocMaxSubmitJobLimit" >&2
  echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" \\
    "(job submit limit, user's size and/or time limits)" >&2
  exit 1
fi
exec {sbatch} "$@"
"""


def missing_programs() -> list[str]:
    """The programs of a cluster that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]


def _program(name: str) -> str:
    found = shutil.which(name, path=SEARCHED)
    assert found is not None
    return found


def _free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _daemon(folder: Path, *command: str) -> Iterator[None]:
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield
        finally:
            process.terminate()


def _until_ready(folder: Path) -> None:
    for _ in range(300):
        answer = subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
    raise AssertionError(f"The cluster did not come up.\n{logs}")


@contextmanager
def running_cluster() -> Iterator[Path]:
    """Start the cluster, with SLURM_CONF and PATH set for it, and yield its folder.

    A number in the file `limit` there is how many jobs may be in the queue.
    """
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        for name in ("state", "spool", "munge", "bin"):
            (folder / name).mkdir(mode=0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        names = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "folder": folder}
        ports = {"controller": _free_port(), "node": _free_port()}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**names, **ports))
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        limited = folder / "bin" / "sbatch"
        programs = {name: _program(name) for name in ("sbatch", "squeue")}
        limited.write_text(LIMITED_SBATCH.format(folder=folder, **programs))
        limited.chmod(0o755)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        os.environ["PATH"] = f"{folder / 'bin'}:{SEARCHED}"
        stack.callback(_restore, before)
        places = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
        key = f"--key-file={folder}/munge.key"
        munged = (_program("munged"), "--force", "--foreground", key, f"--socket={folder}/munge/socket", *places)
        stack.enter_context(_daemon(folder, *munged))
        while not (folder / "munge" / "socket").exists():
            time.sleep(0.05)
        stack.enter_context(_daemon(folder, _program("slurmctld"), "-D"))
        stack.enter_context(_daemon(folder, _program("slurmd"), "-D"))
        stack.callback(lambda: subprocess.run(["scancel", f"--user={os.getuid()}"], check=False))
        _until_ready(folder)
        yield folder


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


LATER = {"slurm_additional_parameters": {"begin": "now+1hour"}}  # such a job stays in the queue
SWEEP = ("--datasets", "DebugVector", "--algorithms", "ERM", "--n-hparams", "1", "--n-trials", "1")
SMALL = ("--hparam", "mlp_width=8", "--hparam", "mlp_depth=3", "--hparam", "batch_size=8", "--no-calibrate")
SLURM = ("--executor", "slurm", "--slurm", "time=10", "--slurm", "cpus_per_task=1", "--slurm", "partition=main")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    if missing := missing_programs():
        pytest.skip(f"needs Slurm: {', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    with running_cluster() as folder:
        yield folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "QUEUE_SECONDS", "RETRY_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(slurm_module, name, 0.2)


def queue(state: str = "all") -> list[str]:
    command = ["squeue", "--noheader", f"--states={state}", "--format=%i"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.usefixtures("cluster", "quick")
def test_a_cancelled_job_is_noticed_without_accounting_and_only_so_many_workers_are_queued(tmp_path: Path) -> None:
    executor = SlurmExecutor(tmp_path, workers=1, parameters=LATER)  # type: ignore[arg-type]
    before = set(queue())
    first, second = executor.submit(pow, 2, 3), executor.submit(pow, 2, 4)
    until(lambda: bool(set(queue()) - before))
    (job,) = set(queue()) - before
    assert not second.done()
    subprocess.run(["scancel", job], check=True)
    with pytest.raises(LostJobError, match=f"job {job} ended without a result"):
        first.result(timeout=60)
    until(lambda: bool(queue("pending")))  # the second one has its turn
    executor.shutdown(cancel_futures=True)
    assert second.cancelled()
    assert queue("pending") == []


@pytest.mark.usefixtures("cluster", "quick")
@pytest.mark.parametrize(
    ("parameters", "said"), [({"slurm_partition": "nowhere"}, "invalid partition"), ({"slurm_gres": "gpu:1"}, "gres")]
)
def test_what_slurm_refuses_for_good_is_one_line(tmp_path: Path, parameters: dict[str, str], said: str) -> None:
    with SlurmExecutor(tmp_path, parameters=parameters) as executor:
        error = executor.submit(pow, 2, 3).exception(timeout=60)
    assert isinstance(error, SandmaskError)
    assert said in str(error)
    assert "\n" not in str(error)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("quick")
def test_a_limit_on_submitted_jobs_is_waited_for(cluster: Path, tmp_path: Path) -> None:
    (cluster / "limit").write_text("1")
    executor = SlurmExecutor(tmp_path, parameters=LATER)  # type: ignore[arg-type]
    first, second = executor.submit(pow, 2, 3), executor.submit(pow, 2, 4)
    until((cluster / "refused").exists)
    (job,) = queue("pending")
    subprocess.run(["scancel", job], check=True)
    assert isinstance(first.exception(timeout=60), LostJobError)
    until(lambda: queue("pending") not in ([], [job]))
    assert not second.done()
    executor.shutdown(cancel_futures=True)
    (cluster / "limit").unlink()


@pytest.mark.usefixtures("cluster")
def test_the_documented_command_trains_a_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandmask", "sweep", "run", str(tmp_path), *SWEEP, *SMALL, "--steps", "5", *SLURM]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    assert [run.status for run in read_runs(tmp_path)] == ["done"] * 3


@pytest.mark.usefixtures("cluster")
def test_a_job_divides_its_stack_by_the_memory_of_its_own_machine(tmp_path: Path) -> None:
    plugin = tmp_path / "small_machine.py"  # as the job sees it: the driver asks for memory elsewhere
    plugin.write_text("from sandmask.sweeps import _job\n_job.available_memory = lambda device: 1.0\n")
    sweep = (sys.executable, "-m", "sandmask", "sweep", "run", str(tmp_path / "sweep"), *SWEEP, *SMALL, "--steps", "5")
    subprocess.run([*sweep, *SLURM, "--plugin", str(plugin)], check=True, capture_output=True, timeout=240)
    assert [run.status for run in read_runs(tmp_path)] == ["done"] * 3
    assert len(list((tmp_path / "sweep" / "stacks").glob("*.records.parquet"))) == 3


@pytest.mark.usefixtures("cluster")
def test_a_machine_without_a_gpu_submits_jobs_for_one(tmp_path: Path) -> None:
    plugin = tmp_path / "pretended_gpu.py"  # as the job sees it: the driver checks devices elsewhere
    pretend = 'lambda text: torch.device({"cuda:99": "cpu"}[text])'
    plugin.write_text(f"import torch\nfrom sandmask.sweeps import _job\n_job.choose_device = {pretend}\n")
    sweep = (sys.executable, "-m", "sandmask", "sweep", "run", str(tmp_path / "sweep"), *SWEEP, *SMALL, "--steps", "5")
    options = (*SLURM, "--device", "cuda:99", "--plugin", str(plugin))
    subprocess.run([*sweep, *options], check=True, capture_output=True, timeout=240)
    assert [run.status for run in read_runs(tmp_path)] == ["done"] * 3


@pytest.mark.usefixtures("cluster")
def test_the_first_sigterm_ends_the_driver_and_its_jobs_save(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    options = (
        *SWEEP,
        *SMALL,
        "--steps",
        "1000000",
        "--checkpoint-every",
        "100",
        *SLURM,
        "--checkpoint-seconds",
        "3600",
    )
    command = [sys.executable, "-m", "sandmask", "sweep", "run", str(tmp_path), *options]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: len(list(stacks.glob("*.progress.json"))) == 1)
    driver.send_signal(signal.SIGTERM)
    _, said = driver.communicate(timeout=120)
    assert (driver.returncode, said.splitlines()[-1].split(";")[0]) == (143, "stopped")
    assert len(list(stacks.glob("*.checkpoint.safetensors"))) == 1
    until(lambda: queue("running,pending,completing") == [])
