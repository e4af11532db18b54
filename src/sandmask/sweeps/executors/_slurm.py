"""On a Slurm cluster, through submitit. The folder of the sweep has to be on a disk that all machines share."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sandmask.errors import SandmaskError
from sandmask.sweeps.executors._base import EXECUTORS, ExecutorEntry, ExecutorOptions

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 1.0
TIMEOUT_MINUTES = 60


class SlurmExecutor(Executor):
    """Each job a Slurm job. One that is preempted or runs out of time is queued again by submitit."""

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
                f"Slurm gives whole GPUs. Found --gpus-per-worker {gpus}: use 1, or the executor 'ray'."
            )
        try:
            import submitit
        except ImportError as error:
            raise SandmaskError(
                "The executor 'slurm' needs submitit. Install it with: pip install 'sandmask[slurm]'"
            ) from error
        settings: dict[str, Any] = {"gpus_per_node": int(gpus), "cpus_per_task": cpus, "timeout_min": TIMEOUT_MINUTES}
        if cluster == "slurm":
            settings |= {"slurm_array_parallelism": workers} if workers else {}
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**settings, **(parameters or {}))
        except (RuntimeError, NameError, ValueError) as error:
            raise SandmaskError(f"Slurm cannot be used here: {error}") from error
        self._task = _resumable(submitit)
        self._pending: dict[Future[Any], Any] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `fn` as a Slurm job."""
        future: Future[T] = Future()
        self._pending[future] = self._executor.submit(self._task(), fn, args, kwargs)
        return future

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            for future, job in list(self._pending.items()):
                if job.done():
                    self._settle(future, job)

    def _settle(self, future: Future[Any], job: Any) -> None:
        del self._pending[future]
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job.result())
        except Exception as error:  # noqa: BLE001 - the job's own, or that it was lost: for whoever asks
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop watching; jobs that still wait in Slurm's queue are withdrawn when `cancel_futures` says so."""
        if cancel_futures:
            for future, job in list(self._pending.items()):
                if job.state in ("PENDING", "REQUEUED"):
                    job.cancel(check=False)
                    future.cancel()
        if wait:
            wait_for([future for future in self._pending if not future.cancelled()])
        self._ended.set()


def _resumable(submitit: Any) -> Any:
    """What submitit queues again when Slurm stops it: the job goes on from its own checkpoint."""

    class Resumable:
        def __call__(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
            return fn(*args, **kwargs)

        def checkpoint(self, *args: Any) -> Any:
            return submitit.helpers.DelayedSubmission(self, *args)

    return Resumable


def _build(options: ExecutorOptions) -> Executor:
    return SlurmExecutor(
        options.log_folder,
        gpus=options.gpus_per_worker,
        cpus=options.cpus_per_worker,
        workers=options.workers,
        cluster=options.cluster,
        parameters=options.slurm,
    )


EXECUTORS.register(ExecutorEntry("slurm", "a Slurm cluster, through submitit", _build))
