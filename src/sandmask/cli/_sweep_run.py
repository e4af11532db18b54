"""From the options of `sandmask sweep` to executors, devices and stack sizes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.records import RunSpec
    from sandmask.sweeps import Estimator, Expansion, JobOptions, SweepFolder

MOST_CORES = 8  # workers on a CPU, unless more are asked for: each takes half a gigabyte

_SHORT = {"time": "timeout_min", "mem": "mem_gb"}  # Slurm's names, and submitit's
_GENERAL = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "nodes", "tasks_per_node")


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
        short = name.removeprefix("slurm_")
        full = _SHORT.get(short, short)
        if full == "mem_gb" and not value.isdecimal():
            full = "mem"  # Slurm's own notation, such as 16G
        if full in _GENERAL and full != "timeout_min" and not value.isdecimal():
            raise SandmaskError(f"--slurm {short}= should be a whole number. Found {value!r}.")
        number = int(value) if value.isdecimal() else value
        known = full in _GENERAL or full == "cluster"
        parameters[full if known else f"slurm_{full}"] = _minutes(value) if full == "timeout_min" else number
    return parameters


def _minutes(value: str) -> int:
    """Slurm's notations of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes]."""
    days, dash, rest = value.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in (*parts, *([days] if dash else []))):
        raise SandmaskError(
            f"--slurm time= should be minutes, hours:minutes:seconds or days-hours:minutes. Found {value!r}."
        )
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        hours += 24 * int(days)
    else:
        hours, minutes, seconds = (0, *numbers, 0)[:3] if len(numbers) < 3 else numbers
    return max(1, 60 * hours + minutes + (seconds > 0))


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
