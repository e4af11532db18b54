"""Train on a Ray cluster: a running cluster, or a cluster that is started here and stopped afterwards."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from sandmask.errors import SandmaskError

P = ParamSpec("P")
T = TypeVar("T")

RETRIES = 5  # of a job whose worker or machine was lost
CONNECT_SECONDS = 10.0


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
        if self._started and address is None:
            self._check_machine(gpus, cpus)
        options = {"num_gpus": gpus, "num_cpus": cpus, "max_retries": RETRIES}
        self._task = self._ray.remote(**options)(_call)
        self._pending: dict[Future[Any], Any] = {}

    def _connect(self, address: str | None, cpus: int | None) -> None:
        here = {} if address else {"num_cpus": cpus, "include_dashboard": False}
        try:
            _check_reachable(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
            with _own_sigterm():
                self._ray.init(address=address or "local", log_to_driver=False, logging_level="error", **here)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise SandmaskError(
                f"Ray cannot be reached or started (address {address!r}): {str(error).rstrip('.')}. "
                "Start a cluster with `ray start --head`, or omit --ray-address to start one here."
            ) from error

    def _check_machine(self, gpus: float, cpus: float) -> None:
        """Refuse workers that do not fit on this machine. Ray would silently wait for more machines."""
        there = self._ray.cluster_resources()
        for option, kind, needed in (("gpus", "GPU", gpus), ("cpus", "CPU", cpus)):
            if needed > there.get(kind, 0):
                self._ray.shutdown()
                raise SandmaskError(
                    f"Each worker needs {needed:g} {kind}s, but Ray finds {there.get(kind, 0):g} here. Lower "
                    f"--{option}-per-worker, or name a cluster with --ray-address."
                )

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
        else:  # Ray wraps the error of a job; an error without a cause is Ray's own: the job was lost
            future.set_exception(getattr(error, "cause", None) or error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the executor, and the cluster if it was started for it."""
        pending = dict(self._pending)
        if cancel_futures:
            for reference in pending.values():
                self._ray.cancel(reference)  # queued: dropped; running: interrupted, as by Ctrl-C
        if wait:
            wait_for(pending)
        if self._started:
            self._ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Connect to the address once. Ray itself tries for more than ten minutes if nothing answers."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the program's handler of SIGTERM: Ray installs one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)
