"""On a Ray cluster: one that runs already, or one started here for the while."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from typing import Any, ParamSpec, TypeVar

from sandmask.errors import SandmaskError
from sandmask.sweeps.executors._base import EXECUTORS, ExecutorEntry, ExecutorOptions

P = ParamSpec("P")
T = TypeVar("T")

RETRIES = 5  # of a job whose worker or machine was lost


class RayExecutor(Executor):
    """Jobs as Ray tasks. A job whose worker or machine is lost is run again elsewhere."""

    def __init__(
        self, address: str | None = None, *, gpus: float = 0.0, cpus: float = 1, workers: int | None = None
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise SandmaskError("The executor 'ray' needs Ray. Install it with: pip install 'sandmask[ray]'") from error
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            self._connect(address, None if workers is None else max(1, int(workers * cpus)))
        options = {"num_gpus": gpus, "num_cpus": cpus, "max_retries": RETRIES}
        self._task = self._ray.remote(**options)(_call)
        self._pending: dict[Future[Any], Any] = {}

    def _connect(self, address: str | None, cpus: int | None) -> None:
        here = {} if address else {"num_cpus": cpus, "include_dashboard": False}
        try:
            self._ray.init(address=address or "local", log_to_driver=False, logging_level="error", **here)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SandmaskError(
                f"Ray cannot be reached or started (address {address!r}): {error} "
                "Start a cluster with `ray start --head`, or leave --ray-address away to have one here."
            ) from error

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `fn` on the cluster."""
        reference = self._task.remote(fn, args, kwargs)
        future: Future[T] = Future()
        self._pending[future] = reference
        reference.future().add_done_callback(lambda done: self._settle(future, done))
        return future

    def _settle(self, future: Future[T], done: Future[T]) -> None:
        self._pending.pop(future, None)
        error = done.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(done.result())
        else:  # Ray wraps what a job raised; errors without a cause are its own: the job was lost
            future.set_exception(getattr(error, "cause", None) or error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop; a cluster that was started for this executor ends with it."""
        pending = dict(self._pending)
        if cancel_futures:
            for reference in pending.values():
                self._ray.cancel(reference)  # queued: dropped; running: interrupted, as by Ctrl-C
        if wait:
            wait_for(pending)
        if self._started:
            self._ray.shutdown()


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


def _build(options: ExecutorOptions) -> Executor:
    return RayExecutor(
        options.ray_address,
        gpus=options.gpus_per_worker,
        cpus=options.cpus_per_worker,
        workers=options.workers,
    )


EXECUTORS.register(ExecutorEntry("ray", "a Ray cluster, by its address or started here", _build, remote=True))
