"""Train on this machine, in this process or in worker processes that divide the GPUs or cores."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from sandmask._files import is_alive

P = ParamSpec("P")
T = TypeVar("T")
SEMAPHORES = Path("/dev/shm")  # noqa: S108 - where Linux keeps them
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PIPES, MPS_LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
MPS_SECONDS = 30.0  # that the daemon may take to answer


class InlineExecutor(Executor):
    """Runs a job when it is submitted, in the calling thread. Ctrl-C reaches the job itself."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` and return a finished future. An interrupt is raised and not stored in it."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            future.set_exception(error)
        return future


class WorkerExecutor(ProcessPoolExecutor):
    """Worker processes, spawned rather than forked because of GPUs, each with its own device.

    They ignore Ctrl-C; the process that started them asks them to save and stop, and they end with it. A second Ctrl-C,
    while that process waits for them, kills them. SIGTERM, which a batch system sends to all processes at once, is
    deferred by `run_job` until the stack has been saved.

    They do not import the program that started them, so a script needs no `if __name__ == "__main__":`, and a notebook
    can use them. The functions that they run must be importable from a module.
    """

    def __init__(self, workers: int, devices: tuple[str, ...] = ()) -> None:
        _name_semaphores()
        context = multiprocessing.get_context("spawn")
        arguments = (context.Value("i", 0), devices, max(1, (os.cpu_count() or 1) // workers))
        super().__init__(workers, mp_context=context, initializer=_prepare, initargs=arguments)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call. New workers start with SIGINT blocked, which may arrive while they import."""
        with _interrupts_wait(), _main_hidden():
            return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down. After an interrupted wait, workers are killed, because they would never end."""
        workers = list((self._processes or {}).values())
        try:
            super().shutdown(wait, cancel_futures=cancel_futures)
        except KeyboardInterrupt:
            for worker in workers:
                worker.kill()
                worker.join()
            raise


def _name_semaphores() -> None:
    """Name the semaphores of this process by its process id, and remove those of processes that were killed."""
    config = getattr(multiprocessing.current_process(), "_config", None)  # there is no public setting
    if not SEMAPHORES.is_dir() or config is None:
        return
    config["semprefix"] = f"/sandmask-{os.getpid()}"
    for path in SEMAPHORES.glob("sem.sandmask-*-*"):
        owner = path.name.split("-")[1]
        with suppress(OSError):
            if owner.isdecimal() and not is_alive(int(owner)):
                path.unlink()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Block SIGINT during the block, and permanently in processes that are started in it."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep processes that are started meanwhile from importing the main module, which would run a script once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _prepare(counter: Any, devices: tuple[str, ...], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from sandmask.sweeps._job import deal_device

    torch.set_num_threads(min(threads, torch.get_num_threads()))
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    if devices:
        deal_device(devices[number % len(devices)])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # nobody needs the results any more; checkpoints are on the disk


def workers_share(devices: Sequence[str], workers: int) -> bool:
    """Whether several workers share a GPU, on Linux, where MPS exists.

    :param devices: the devices of the workers, assigned in turn.
    :param workers: number of workers.
    """
    return sys.platform == "linux" and workers > len(devices) and all(each.startswith("cuda") for each in devices)


@contextmanager
def shared_gpus(notice: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Run NVIDIA's Multi-Process Service (MPS) for processes that are started inside the block, unless it runs already.

    With it, workers that share a GPU compute at the same time. If it cannot be started, they take turns on the GPU.

    :param notice: called with the reason if it cannot be started.
    """
    if _call_mps(text="get_server_list\n") is None:  # a daemon answers where workers would look for one
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="sandmask-mps-", ignore_cleanup_errors=True) as folder,
        _mps_folder(folder),
    ):
        reason = _call_mps("-d")
        if reason is not None:
            notice(f"MPS could not be started ({reason}): the workers take turns on the GPU.")
        try:
            yield
        finally:
            if reason is None:
                _call_mps(text="quit\n")  # if this fails, the daemon ends with its last client


@contextmanager
def _mps_folder(folder: str) -> Iterator[None]:
    """Set the folder in which the daemon and its clients find each other. Worker processes inherit the setting."""
    before = {name: os.environ.get(name) for name in (MPS_PIPES, MPS_LOGS)}
    os.environ.update(dict.fromkeys(before, folder))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _call_mps(*arguments: str, text: str = "") -> str | None:
    """Run the control program of MPS, away from this terminal's Ctrl-C. Return why it failed; None if it did not."""
    if shutil.which(MPS_CONTROL) is None:
        return f"{MPS_CONTROL} is not installed"
    try:
        done = subprocess.run(
            [MPS_CONTROL, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=MPS_SECONDS,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[0]
