"""Train on a Slurm cluster through submitit. All machines have to share the disk with the sweep's folder."""

import contextlib
import io
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sandmask._signals import deferred
from sandmask.errors import SandmaskError

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 1.0  # between looks for results
QUEUE_SECONDS = 5.0  # between calls of squeue
RETRY_SECONDS = 15.0  # between submissions that Slurm refuses for now
GRACE_SECONDS = 10.0  # for the result of a job that has ended to appear on a network disk
TIMEOUT_MINUTES = 60

# sbatch has one exit status for everything. These words mean "not now"; every other refusal is final.
_LATER = (
    *("MaxSubmit", "MaxJobs", "job submit limit", "queue full", "temporarily", "Resource temporarily unavailable"),
    *("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were transmitted"),
)
# Reasons that name another limit. Their messages also contain "job submit limit".
_NEVER = ("PerJobLimit", "MaxWall", "MaxCpu", "MaxTRES", "MaxNode", "MinCpu", "MinTRES")
_UNDER_WAY = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING"),
    *("SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
)


class LostJobError(RuntimeError):
    """A Slurm job ended without a result: it was cancelled, killed, or its machine was lost."""


class _NotNowError(Exception):
    """Slurm accepts no further job at the moment."""


@dataclass
class _Submitted:
    """A job in Slurm. `gone` is the time at which it was first seen to have ended."""

    future: Future[Any]
    job: Any
    state: str = "PENDING"
    gone: float | None = None


class SlurmExecutor(Executor):
    """Each call is a Slurm job, and at most `workers` of them are in Slurm's queue at a time.

    A job that runs out of time is queued again by submitit. If Slurm limits the number of jobs, the executor submits
    as many as are allowed, and the others after these have ended. The state of jobs is read with `squeue`, because
    `sacct` works only on clusters with accounting. One thread submits and watches.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        gpus: float = 0.0,
        cpus: int = 1,
        workers: int | None = None,
        cluster: str = "slurm",
        parameters: Mapping[str, str | int] | None = None,
    ) -> None:
        if gpus != int(gpus):
            raise SandmaskError(
                f"Slurm assigns only whole GPUs. Found --gpus-per-worker {gpus}: use 1, or the executor 'ray'."
            )
        try:
            import submitit
        except ImportError as error:
            raise SandmaskError(
                "The executor 'slurm' needs submitit. Install it with: pip install 'sandmask[slurm]'"
            ) from error
        settings: dict[str, Any] = {"cpus_per_task": cpus, "timeout_min": TIMEOUT_MINUTES}
        settings |= {"gpus_per_node": int(gpus)} if gpus else {}
        self._folder = Path(folder) / uuid.uuid4().hex[:8]  # submitit leaves files of refused jobs there
        try:
            self._executor = submitit.AutoExecutor(folder=self._folder, cluster=cluster)
            self._executor.update_parameters(**{**settings, **(parameters or {})})
        except (RuntimeError, NameError, ValueError, TypeError, AssertionError) as error:
            raise SandmaskError(f"Slurm cannot be used here: {_one_line(error)}.") from error
        self._workers, self._asks_slurm = workers, cluster == "slurm"
        self._waiting: deque[tuple[Future[Any], tuple[Any, ...]]] = deque()
        self._submitted: list[_Submitted] = []
        self._futures: list[Future[Any]] = []
        self._retry_at, self._looked_at = 0.0, time.monotonic()
        self._wake, self._cancelled, self._ended = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `fn` as a Slurm job. If Slurm rejects it, the future's exception is a `SandmaskError`."""
        future: Future[T] = Future()
        self._futures.append(future)
        self._waiting.append((future, (fn, args, kwargs)))
        self._wake.set()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all jobs to end. With `cancel_futures`, jobs that have not started are cancelled.

        If the wait is interrupted, running jobs are cancelled too: they receive SIGTERM, save and end.
        """
        if cancel_futures:
            self._cancelled.set()
            self._wake.set()
        try:
            if wait:
                wait_for(self._futures)
        except KeyboardInterrupt:
            self._scancel()
            raise
        finally:
            self._ended.set()
            self._wake.set()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            for each in list(self._submitted):
                self._settle(each)
            if self._cancelled.is_set():
                self._withdraw()
            elif self._asks_slurm and time.monotonic() - self._looked_at > QUEUE_SECONDS:
                self._look()
            if self._may_submit():
                self._submit_next()

    def _may_submit(self) -> bool:
        room = self._workers is None or len(self._submitted) < self._workers
        return bool(self._waiting) and room and time.monotonic() >= self._retry_at

    def _submit_next(self) -> None:
        """Submit one job. The thread then looks for results before it submits the next one."""
        future, call = self._waiting[0]
        try:
            self._submitted.append(_Submitted(future, self._sbatch(call)))
        except _NotNowError:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the results
            while self._waiting:
                _fail(self._waiting.popleft()[0], error)
            return
        self._waiting.popleft()
        self._wake.set()

    def _sbatch(self, call: tuple[Any, ...]) -> Any:
        before = set(self._folder.glob("*"))
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
                return self._executor.submit(_Resumable(), *call)
        except Exception as error:
            for path in set(self._folder.glob("*")) - before:
                path.unlink(missing_ok=True)
            said = _one_line(error).replace("sbatch: error: ", "")
            if any(word in said for word in _LATER) and not any(word in said for word in _NEVER):
                raise _NotNowError(said) from error
            raise SandmaskError(
                f"Slurm refuses the job: {said}. Correct --slurm, --gpus-per-worker or --cpus-per-worker, or check the "
                "cluster: sinfo"
            ) from error

    def _settle(self, each: _Submitted) -> None:
        """Pass on the result of a job, or give up a job that has ended without one."""
        if self._has_result(each.job):
            self._submitted.remove(each)
            try:
                result = each.job.result()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
                _fail(each.future, error)
            else:
                if each.future.set_running_or_notify_cancel():
                    each.future.set_result(result)
        elif each.gone is not None and time.monotonic() - each.gone > GRACE_SECONDS:
            self._submitted.remove(each)
            said = f"Slurm job {each.job.job_id} ended without a result ({each.state}); see {each.job.paths.stderr}"
            _fail(each.future, LostJobError(said))

    def _has_result(self, job: Any) -> bool:
        if not self._asks_slurm:
            return bool(job.done())
        with contextlib.suppress(OSError):
            os.listdir(job.paths.folder)  # makes a network disk look for new files now  # noqa: PTH208
        return bool(job.paths.result_pickle.exists())

    def _look(self) -> None:
        """Query the state of this user's jobs. A job that Slurm no longer knows has ended."""
        self._looked_at = time.monotonic()
        command = ["squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%i|%T"]
        try:
            answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):  # the controller is busy, or restarts
            return
        states = dict(line.strip().split("|", 1) for line in answer.splitlines() if "|" in line)
        for each in self._submitted:
            each.state = states.get(each.job.job_id, "no longer known to Slurm")
            if each.state in _UNDER_WAY:
                each.gone = None
            elif each.gone is None:
                each.gone = time.monotonic()

    def _withdraw(self) -> None:
        """Cancel the jobs that wait here or in Slurm's queue. Running jobs save and end by themselves."""
        while self._waiting:
            _cancel(self._waiting.popleft()[0])
        if not self._asks_slurm:
            return
        self._scancel("--state=PENDING")  # scancel checks the state: a job that has just started goes on
        self._look()
        for each in list(self._submitted):
            if each.gone is not None and not self._has_result(each.job):
                self._submitted.remove(each)
                _cancel(each.future)

    def _scancel(self, *options: str) -> None:
        names = [each.job.job_id for each in list(self._submitted)]
        if self._asks_slurm and names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["scancel", *options, *names], capture_output=True, timeout=60, check=False)


def _cancel(future: Future[Any]) -> None:
    if future.cancel():
        future.set_running_or_notify_cancel()  # tells those who wait


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(" .")


class _Resumable:
    """A call that submitit queues again when Slurm stops it. The job then continues from its own checkpoint.

    The signal with which Slurm warns before the time is up is deferred until the job has saved. `run_job` handles
    SIGTERM.
    """

    def __call__(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        import submitit

        warning = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
        with deferred(warning):
            return fn(*args, **kwargs)

    def checkpoint(self, *args: Any) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, *args)
