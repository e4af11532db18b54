"""NVIDIA's Multi-Process Service (MPS): workers that share a GPU compute at the same time instead of taking turns."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30.0  # that the daemon may take to answer


def workers_share(devices: Sequence[str], workers: int) -> bool:
    """Whether several workers are dealt the same GPU.

    :param devices: the devices of the workers, dealt in turn.
    :param workers: how many there are.
    """
    return sys.platform == "linux" and workers > len(devices) and all(each.startswith("cuda") for each in devices)


@contextmanager
def shared_gpus(notice: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Run NVIDIA MPS for processes that are started inside the block, unless it already runs.

    If it cannot be started, the workers take turns on the GPU.

    :param notice: called with the reason if it cannot be started.
    """
    if _running():
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="sandmask-mps-", ignore_cleanup_errors=True) as folder,
        _environment(folder),
    ):
        reason = _start()
        if reason is not None:
            notice(f"MPS could not be started ({reason}): the workers take turns on the GPU.")
        try:
            yield
        finally:
            if reason is None:
                _stop()


@contextmanager
def _environment(folder: str) -> Iterator[None]:
    """Where the daemon and its clients find each other, for a while; worker processes inherit it."""
    before = {name: os.environ.get(name) for name in (PIPES, LOGS)}
    os.environ.update(dict.fromkeys(before, folder))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start() -> str | None:
    """Start the daemon; the reason why not, or None."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    try:
        done = _call("-d")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[0]
    return None if done.returncode == 0 else said


def _running() -> bool:
    """Whether a daemon answers where workers would look for one."""
    if shutil.which(CONTROL) is None:
        return False
    try:
        return _call(text="get_server_list\n").returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _stop() -> None:
    try:
        _call(text="quit\n")
    except (OSError, subprocess.TimeoutExpired):
        return  # it ends with its last client


def _call(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the control program, away from this terminal's Ctrl-C."""
    return subprocess.run(
        [CONTROL, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        start_new_session=True,
    )
