"""Arguments of `sandmask.sweep`: the sweep that they describe, and its workers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from sandmask._arguments import Names, PathLike, names_in
from sandmask._torchrun import world_size
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DATASETS
from sandmask.errors import SandmaskError
from sandmask.networks import NETWORKS
from sandmask.plugins import is_plugin_module
from sandmask.sweeps import SweepFolder, SweepSpec, normalized, read_sweep
from sandmask.sweeps._spec import LISTS, OPTUNA
from sandmask.sweeps.executors import EXECUTORS, ExecutorOptions, workers_share
from sandmask.training import choose_device
from sandmask.training.precision import sweep_precision

MOST_CORES = 8  # largest default number of workers on a CPU; each takes half a gigabyte
_LEAST_MEGABYTES = 500  # that a worker needs
_GENERAL = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "nodes", "tasks_per_node")


class SweepRequest(TypedDict, total=False):
    """The arguments that say which runs a sweep has; `sweep` describes each."""

    config: PathLike | None
    datasets: Names | None
    algorithms: Names | None
    test_envs: Names | None
    n_hparams: int | None
    n_trials: int | None
    space: str | None
    selection: Names | None
    steps: int | None
    checkpoint_every: int | None
    hparams: Mapping[str, str | float] | None
    network: str | None
    weights: str | None
    precision: str | None
    averages: Names | None
    metrics: Names | None
    train_eval_limit: int | None
    keep_models: str | None
    shared_init: bool | None
    first_stage: PathLike | None
    seed: int | None
    search: str | None
    sampler: str | None
    pruner: str | None


def requested_sweep(
    folder: SweepFolder, device: str | None = None, *, config: PathLike | None = None, **given: Any
) -> SweepSpec:
    """The sweep that the arguments, the folder and the configuration file describe.

    :param folder: the sweep's folder, which may hold an earlier request.
    :param device: where the sweep will train, which decides the default precision.
    :param config: TOML file with fields of `SweepSpec`.
    :param given: fields of `SweepSpec`; those that are None are not changed.
    """
    fields: dict[str, Any] = {
        name: names_in(value) if name in LISTS else value for name, value in given.items() if value is not None
    }
    stored = folder.read_spec()
    if config is None and stored is not None:
        return normalized(replace(stored, **fields))
    fields = {**(read_sweep(Path(config)) if config is not None else {}), **fields}
    for name in ("datasets", "algorithms"):
        if name not in fields:
            raise SandmaskError(f"{folder.path} holds no sweep yet: name its {name} with --{name} or --config.")
    fields.setdefault("precision", sweep_precision(device))
    sweep = normalized(SweepSpec(**fields))
    if sweep.full_data and sweep.keep_models == "best":
        raise SandmaskError(
            "--keep-models best needs validation accuracies, but runs with full_data=1 have none. Use --keep-models "
            "last."
        )
    return sweep


@dataclass(frozen=True)
class Workers:
    """The workers of a sweep.

    `devices` are those of the workers, `count` is the number of stacks that train at a time, and `device` the device
    of all jobs, if they share one. `executor` builds the executor. Workers of a `remote` executor may not share
    this disk.
    `shares` says whether several workers share a GPU of this machine. Workers on other machines have `cores` cores
    each, and devices of the kind `elsewhere`; on this machine, both are None. `notes` are messages for the user.
    """

    devices: tuple[str, ...]
    count: int
    device: str | None
    executor: Callable[[], Executor]
    remote: bool
    shares: bool = False
    cores: int | None = None
    elsewhere: str | None = None
    notes: tuple[str, ...] = ()


def choose_workers(
    folder: SweepFolder,
    sweep: SweepSpec,
    *,
    executor: str,
    device: str | None,
    slurm: Mapping[str, str | int] | Sequence[str] = (),
    workers: int | None = None,
    gpus_per_worker: float = 0.0,
    cpus_per_worker: int = 1,
    ray_address: str | None = None,
) -> Workers:
    """The workers that the arguments of a sweep describe."""
    if world_size() > 1:
        raise SandmaskError("A sweep starts its own workers. Run it without torchrun; see --workers and --device.")
    entry = EXECUTORS[executor]
    devices, count = device_list(device, workers, elsewhere=entry.elsewhere)
    parameters = slurm_parameters(slurm)
    if slurm and entry.name != "slurm":
        raise SandmaskError("--slurm needs --executor slurm.")
    if ray_address is not None and entry.name != "ray":
        raise SandmaskError("--ray-address needs --executor ray.")
    if entry.name == "local" and (gpus_per_worker > 0 or cpus_per_worker > 1):
        raise SandmaskError(
            "--gpus-per-worker and --cpus-per-worker are for --executor ray and slurm. Choose the devices of local "
            "workers with --device, such as cuda:0,cuda:1, and their number with --workers."
        )
    if sweep.search == OPTUNA and entry.remote:
        raise SandmaskError(
            f"--search optuna needs workers that see the sweep's folder, but workers of {entry.name} may not. Use "
            "--executor local or slurm."
        )
    local, notes = entry.name == "local", []
    if local and count > 1 and (own := _own_names(sweep)):
        count = 1
        notes.append(
            f"{', '.join(own)}: registered by this program, which worker processes do not import. The sweep trains in "
            "this process. To use several processes, move the registration to a file and name it as a plugin."
        )
    options = ExecutorOptions(
        workers=count if local else workers,
        devices=devices,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
        ray_address=ray_address,
        log_folder=str(folder.path / "slurm"),
        cluster=str(parameters.pop("cluster", "slurm")),
        slurm=parameters,
    )
    dealt = None if len(devices) > 1 else devices[0]  # several devices are assigned to local workers in turn
    asked = device_of_workers(executor, device, gpus_per_worker) or "cpu"
    return Workers(
        devices,
        count,
        dealt if local else device,
        lambda: entry.build(options),
        entry.remote,
        shares=local and workers_share(devices, count),
        cores=int(parameters.get("cpus_per_task", cpus_per_worker)) if entry.elsewhere else None,
        elsewhere=torch.device(asked).type if entry.elsewhere else None,
        notes=tuple(notes),
    )


def device_of_workers(executor: str, device: str | None, gpus_per_worker: float) -> str | None:
    """The requested device of a sweep's workers. On other machines, the default does not depend on this machine."""
    if device is not None or not EXECUTORS[executor].elsewhere:
        return device
    return "cuda" if gpus_per_worker > 0 else "cpu"


def device_list(device: str | None, workers: int | None, *, elsewhere: bool = False) -> tuple[tuple[str, ...], int]:
    """The devices of workers, and the number of workers: one for each GPU or core, unless `workers` is given.

    With `elsewhere`, workers are on other machines, and their device need not exist on this machine. On a CPU, there is
    one worker with one thread for each core, because small matrix products do not use several cores well.
    """
    if workers is not None and workers < 1:
        raise SandmaskError(f"workers should be at least 1. Found {workers}.")
    if device is not None:
        words = () if elsewhere else tuple(word.strip() for word in device.split(",") if word.strip())
        devices = words or (device,)
        for each in devices:
            choose_device(each, here=not elsewhere)
    else:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = tuple(f"cuda:{number}" for number in range(gpus)) or ("cpu",)
    cores = min(torch.get_num_threads(), MOST_CORES) if devices == ("cpu",) else len(devices)
    return devices, workers or cores


def _own_names(sweep: SweepSpec) -> list[str]:
    """The names in a sweep that the calling program registered, which other processes would not find."""
    named = [
        *((name, ALGORITHMS.module_of(name)) for name in sweep.algorithms),
        *((name, DATASETS.module_of(name.partition(":")[0])) for name in sweep.datasets),
        *([(sweep.network, NETWORKS.module_of(sweep.network))] if sweep.network is not None else []),
    ]
    known = ("", "sandmask")
    return [name for name, module in named if module.partition(".")[0] not in known and not is_plugin_module(module)]


def slurm_parameters(given: Mapping[str, str | int] | Sequence[str]) -> dict[str, str | int]:
    """The parameters of Slurm by submitit's names: `partition=gpu` or {"partition": "gpu"} is slurm_partition."""
    items = [f"{name}={value}" for name, value in given.items()] if isinstance(given, Mapping) else given
    parameters: dict[str, str | int] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise SandmaskError(f"--slurm should look like NAME=VALUE, such as partition=gpu. Found {item!r}.")
        short = name.removeprefix("slurm_")
        full = "timeout_min" if short == "time" else short
        if full == "mem" and value.isdecimal() and 0 < int(value) < _LEAST_MEGABYTES:  # 0 is the memory of the node
            raise SandmaskError(f"--slurm mem={value} is {value} MB in Slurm. For gigabytes, write mem={value}G.")
        if full in _GENERAL and full != "timeout_min" and not value.isdecimal():
            raise SandmaskError(f"--slurm {short}= should be a whole number. Found {value!r}.")
        number = int(value) if value.isdecimal() else value
        known = full in _GENERAL or full == "cluster"
        parameters[full if known else f"slurm_{full}"] = _minutes(value) if full == "timeout_min" else number
    return parameters


def _minutes(value: str) -> int:
    """The minutes of a time limit of Slurm: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes]."""
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
