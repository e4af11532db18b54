"""Executors. Each is a `concurrent.futures.Executor`, and all are built from the same options.

For example:

    from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions

    with EXECUTORS["local"].build(ExecutorOptions(workers=2)) as executor:
        print(executor.submit(pow, 2, 5).result())
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from sandmask.registry import Registry
from sandmask.sweeps.executors._local import InlineExecutor, WorkerExecutor, shared_gpus, workers_share
from sandmask.sweeps.executors._ray import RayExecutor
from sandmask.sweeps.executors._slurm import SlurmExecutor

__all__ = [
    "EXECUTORS",
    "ExecutorEntry",
    "ExecutorOptions",
    "InlineExecutor",
    "RayExecutor",
    "SlurmExecutor",
    "WorkerExecutor",
    "shared_gpus",
    "workers_share",
]


@dataclass(frozen=True)
class ExecutorOptions:
    """Options of executors. Each executor uses those that apply to it.

    At most `workers` jobs run at a time; for Ray, None means as many as the cluster has room for. `devices` are
    assigned to local workers in turn. `gpus_per_worker` may be a fraction: 0.25 puts four workers on a GPU. `slurm` has
    parameters of submitit by name, such as `slurm_partition`. `cluster` is also passed to submitit; "local" runs jobs
    without Slurm, for tests.
    """

    workers: int | None = None
    devices: tuple[str, ...] = ()
    gpus_per_worker: float = 0.0
    cpus_per_worker: int = 1
    ray_address: str | None = None
    log_folder: str = "slurm"
    cluster: str = "slurm"
    slurm: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecutorEntry:
    """A named executor. With `elsewhere`, it runs jobs on other machines; with `remote`, these may not share this
    machine's disk.
    """

    name: str
    description: str
    build: Callable[[ExecutorOptions], Executor]
    remote: bool = False
    elsewhere: bool = False


def _build_local(options: ExecutorOptions) -> Executor:
    workers = options.workers or 1
    return InlineExecutor() if workers == 1 else WorkerExecutor(workers, options.devices)


def _build_ray(options: ExecutorOptions) -> Executor:
    return RayExecutor(
        options.ray_address,
        gpus=options.gpus_per_worker,
        cpus=options.cpus_per_worker,
        workers=options.workers,
    )


def _build_slurm(options: ExecutorOptions) -> Executor:
    return SlurmExecutor(
        options.log_folder,
        gpus=options.gpus_per_worker,
        cpus=options.cpus_per_worker,
        workers=options.workers,
        cluster=options.cluster,
        parameters=options.slurm,
    )


EXECUTORS: Registry[ExecutorEntry] = Registry("executor")
EXECUTORS.register(ExecutorEntry("local", "this machine: this process, or several on its cores or GPUs", _build_local))
EXECUTORS.register(
    ExecutorEntry("ray", "a Ray cluster, by its address or started here", _build_ray, remote=True, elsewhere=True)
)
EXECUTORS.register(ExecutorEntry("slurm", "a Slurm cluster, through submitit", _build_slurm, elsewhere=True))
