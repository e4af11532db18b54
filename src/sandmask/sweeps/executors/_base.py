"""Executors and their registry."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from sandmask.registry import Registry


@dataclass(frozen=True)
class ExecutorOptions:
    """Options of executors; each uses those that apply to it.

    `workers` jobs at a time at most (for Ray, None is as many as the cluster has room for). `devices` are dealt to
    local workers in turn. `gpus_per_worker` may be a fraction: 0.25 puts four workers on a GPU. `slurm` are submitit's
    parameters by name, such as `slurm_partition`; `cluster` is submitit's too, "local" to try it without a Slurm.
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
    """An executor by name. `remote` ones may run jobs on machines that do not see this one's disk."""

    name: str
    description: str
    build: Callable[[ExecutorOptions], Executor]
    remote: bool = False


EXECUTORS: Registry[ExecutorEntry] = Registry("executor")
