"""Semaphores of worker processes: named after their owner, and removed when it was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandmask.sweeps.executors._local import SEMAPHORES, WorkerExecutor

pytestmark = pytest.mark.skipif(not SEMAPHORES.is_dir(), reason="this system keeps semaphores elsewhere")

KILLED = """
import os, signal
from sandmask.sweeps.executors._local import WorkerExecutor
executor = WorkerExecutor(2)
os.killpg(0, signal.SIGKILL)
"""


def semaphores(process: int) -> list[Path]:
    return list(SEMAPHORES.glob(f"sem.sandmask-{process}-*"))


def test_semaphores_of_a_killed_process_are_removed_by_the_next() -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED], start_new_session=True)
    killed.wait()
    left = semaphores(killed.pid)
    with WorkerExecutor(1):
        assert semaphores(os.getpid())
        assert not semaphores(killed.pid)
    assert left, "the killed process left nothing behind: this test shows nothing"
