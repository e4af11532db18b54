"""From the options of `sandmask sweep` to executors, devices and stack sizes."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.records import RunSpec
    from sandmask.sweeps import Estimator, Expansion, JobOptions, SweepFolder

MOST_CORES = 8  # workers on a CPU, unless more are asked for: each takes half a gigabyte

_SHORT = {"time": "timeout_min", "mem": "mem_gb"}  # names that people know, and submitit's
_GENERAL = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "nodes", "tasks_per_node")


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """A scheduler that ends a program (SIGTERM) wants what Ctrl-C wants: save, and stop."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def device_list(device: str | None, workers: int | None) -> tuple[tuple[str, ...], int]:
    """The devices for local workers, and how many workers there are: a GPU or a core each, unless said otherwise.

    Small products of matrices do not fill several cores: a process with one thread on each does more.
    """
    import torch

    from sandmask.training import choose_device

    if device is not None:
        devices = tuple(word.strip() for word in device.split(",") if word.strip())
        for each in devices:
            choose_device(each)
    else:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = tuple(f"cuda:{number}" for number in range(gpus)) or ("cpu",)
    cores = min(torch.get_num_threads(), MOST_CORES) if devices == ("cpu",) else len(devices)
    return devices, workers or cores


def build_executor(
    name: str,
    folder: "SweepFolder",
    *,
    workers: int | None,
    devices: Sequence[str],
    gpus: float,
    cpus: int,
    address: str | None,
    slurm: Sequence[str],
) -> tuple[Callable[[], Executor], bool]:
    """What makes the executor (called when there is work), and whether its workers may see another disk."""
    from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions

    entry = EXECUTORS[name]
    parameters = _slurm_parameters(slurm)
    if slurm and entry.name != "slurm":
        raise SandmaskError("--slurm is for --executor slurm.")
    options = ExecutorOptions(
        workers=workers,
        devices=tuple(devices),
        gpus_per_worker=gpus,
        cpus_per_worker=cpus,
        ray_address=address,
        log_folder=str(folder.path / "slurm"),
        cluster=str(parameters.pop("cluster", "slurm")),
        slurm=parameters,
    )
    return lambda: entry.build(options), entry.remote


def _slurm_parameters(items: Sequence[str]) -> dict[str, str | int]:
    """`partition=gpu` as submitit wants it: slurm_partition."""
    parameters: dict[str, str | int] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise SandmaskError(f"--slurm should look like NAME=VALUE, such as partition=gpu. Found {item!r}.")
        name = _SHORT.get(name, name)
        full = name if name in _GENERAL or name == "cluster" else f"slurm_{name.removeprefix('slurm_')}"
        parameters[full] = int(value) if value.isdecimal() else value
    return parameters


def estimator_for(
    expansion: "Expansion",
    runs: Sequence["RunSpec"],
    options: "JobOptions",
    device: str,
    *,
    measure: bool,
    say: Callable[[str], Any],
) -> "Estimator":
    """What knows the cost of stacks on this machine's device."""
    from sandmask.datasets import Dataset, load_dataset
    from sandmask.sweeps import Estimator
    from sandmask.training import choose_device

    def load(name: str) -> Dataset:
        return load_dataset(expansion.sources[name], options.data_dir, **dict.fromkeys(options.allowances, True))

    return Estimator(
        runs,
        load,
        choose_device(device),
        fast=options.fast,
        weights=options.weights,
        measure=measure,
        notice=say,
    )


def share_of(runs: int, workers: int, most: int | None) -> int | None:
    """At most so many runs in a stack that every worker gets some."""
    fair = -(-runs // workers) if workers > 1 else None
    limits = [limit for limit in (most, fair) if limit is not None]
    return max(1, min(limits)) if limits else None
