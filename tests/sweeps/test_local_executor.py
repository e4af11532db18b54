"""Worker processes on this machine: their semaphores, and NVIDIA's Multi-Process Service (MPS) where they share a GPU.

MPS has a stand-in for its control program. Semaphores are named after their owner, and removed when it was killed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandmask.sweeps.executors import shared_gpus, workers_share
from sandmask.sweeps.executors._local import MPS_CONTROL, MPS_LOGS, MPS_PIPES, SEMAPHORES, WorkerExecutor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is for Linux")
# As the real one: -d starts a daemon in the folder of the pipes; without, commands are read and need a daemon.
PROGRAM = """#!/bin/sh
pipe="${CUDA_MPS_PIPE_DIRECTORY:-$MPS_DEFAULT}/control"
if [ "$1" = -d ]; then
    echo start >> "$MPS_CALLS"
    if [ -n "$MPS_BROKEN" ]; then echo "$MPS_BROKEN" >&2; exit 1; fi
    touch "$pipe"; exit 0
fi
read -r word
if [ ! -e "$pipe" ]; then echo "Cannot find MPS control daemon process" >&2; exit 1; fi
echo "$word" >> "$MPS_CALLS"
if [ "$word" = quit ]; then rm "$pipe"; fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what the stand-in was asked."""
    for name in ("bin", "default"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin" / MPS_CONTROL
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("MPS_DEFAULT", str(tmp_path / "default"))
    monkeypatch.delenv(MPS_PIPES, raising=False)
    monkeypatch.delenv(MPS_LOGS, raising=False)
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


def test_it_is_started_in_a_folder_of_its_own_and_stopped(calls: Path) -> None:
    said: list[str] = []
    with shared_gpus(said.append):
        folder = Path(os.environ[MPS_PIPES])
        assert (folder / "control").exists()
        assert os.environ[MPS_LOGS] == str(folder)
    assert calls.read_text().split() == ["start", "quit"]
    assert not folder.exists()
    assert MPS_PIPES not in os.environ
    assert said == []


def test_it_is_stopped_after_an_interrupt(calls: Path) -> None:
    with pytest.raises(KeyboardInterrupt), shared_gpus():
        raise KeyboardInterrupt
    assert calls.read_text().split() == ["start", "quit"]
    assert MPS_PIPES not in os.environ


def test_a_daemon_that_is_running_is_left_alone(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "default" / "control").touch()
    with shared_gpus():
        assert MPS_PIPES not in os.environ
    assert calls.read_text().split() == ["get_server_list"]


def test_a_daemon_that_does_not_start_is_said_in_one_line(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("MPS_BROKEN", "An instance of this daemon is already running\nmore")
    with shared_gpus(said.append):
        pass
    monkeypatch.setenv("PATH", str(calls.parent))
    with shared_gpus(said.append):
        pass
    first, second = said
    assert first.startswith("MPS could not be started (An instance of this daemon is already running): the workers")
    assert second.startswith(f"MPS could not be started ({MPS_CONTROL} is not installed)")
    assert calls.read_text().split() == ["start"]


def test_workers_that_share_a_gpu() -> None:
    assert workers_share(["cuda"], 2)
    assert workers_share(["cuda:0", "cuda:1"], 3)
    assert not workers_share(["cuda:0", "cuda:1"], 2)
    assert not workers_share(["cpu"], 4)


KILLED = """
import os, signal
from sandmask.sweeps.executors._local import WorkerExecutor
executor = WorkerExecutor(2)
os.killpg(0, signal.SIGKILL)
"""


def semaphores(process: int) -> list[Path]:
    return list(SEMAPHORES.glob(f"sem.sandmask-{process}-*"))


@pytest.mark.skipif(not SEMAPHORES.is_dir(), reason="this system keeps semaphores elsewhere")
def test_semaphores_of_a_killed_process_are_removed_by_the_next() -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED], start_new_session=True)
    killed.wait()
    left = semaphores(killed.pid)
    with WorkerExecutor(1):
        assert semaphores(os.getpid())
        assert not semaphores(killed.pid)
    assert left, "the killed process left nothing behind: this test shows nothing"
