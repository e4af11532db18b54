"""A job trains one stack in a worker. Its arguments and its outcome are plain data; records go to the folder."""

import errno
import gc
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from sandmask._files import replacing
from sandmask._memory import is_out_of_memory, usable_cores
from sandmask._signals import deferred, stop_requested
from sandmask.datasets import DATASETS, Dataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.loggers import log_record
from sandmask.plugins import load_plugins
from sandmask.records import RunRecord, RunSpec, write_archive
from sandmask.sweeps._cost import GUESSED_BYTES, SHARE, available_memory, calibrate, fitting, work_of
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._locks import claim
from sandmask.sweeps._progress import ProgressWriter, expected_seconds
from sandmask.sweeps._pruning import Pruning
from sandmask.sweeps._stacks import equal_parts, split_or_remove, stack_id
from sandmask.training import choose_device, stack_key, train_stack
from sandmask.training.checkpoint import DamagedFileError, load_metadata
from sandmask.training.specs import trains_alone

State = Literal["done", "taken", "memory", "failed", "stopped", "late"]


@dataclass(frozen=True)
class JobOptions:
    """Options for training stacks, the same for all jobs of a sweep.

    On a GPU, `fast` and `compiled` may change the last bits of a run. `compiled` applies only to networks that train
    alone; networks that are stacked have kernels of their own. `allowances` are names of dataset options to turn on,
    such as skip_corrupt.

    `session` names a file in the folder: when it appears, the sweep's jobs save and stop. With `carry`, the outcome
    contains the records, for a worker that does not share the driver's disk. `diagnostics` and `metrics` add to the
    records, and `train_eval_limit` limits the training examples that are evaluated. `loggers` receive every finished
    run. `pruner` is the pruner of a search.

    At the time `ends` (in seconds since 1970), training stops with checkpoints. A stack that has not finished by then
    is "late". A stack that is not expected to finish by then is also "late", and is not started.

    `cores` is set for a worker on another machine than the driver, and is the number of its cores. The worker divides
    a stack that does not fit into the memory of its machine, on which up to `workers` workers may train. With
    `calibrate`, it measures how much memory a run takes.
    """

    folder: str
    session: str = ""
    ends: float | None = None
    data_dir: str | None = None
    allowances: tuple[str, ...] = ()
    weights: str | None = None
    device: str | None = None
    fast: bool = True
    compiled: bool = False
    checkpoint_seconds: float = 30.0
    plugins: tuple[str, ...] = ()
    carry: bool = False
    diagnostics: bool = False
    loggers: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    train_eval_limit: int | None = None
    keep_models: str = "none"
    pruner: str = "none"
    cores: int | None = None
    workers: int | None = None
    calibrate: bool = True


@dataclass(frozen=True)
class Job:
    """A stack and how to train it. `work` is the estimated work in any unit, or 0 if it is not known."""

    source: str  # the dataset: a name, or a folder
    specs: tuple[dict[str, Any], ...]
    options: JobOptions
    work: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job. `runs` are the ids of runs that could not be trained, and `message` says why."""

    state: State
    stack: str
    runs: tuple[str, ...] = ()
    message: str = ""
    archives: dict[str, bytes] = field(default_factory=dict)


_worker: dict[str, str] = {}  # the device that this worker process was assigned
_limits: dict[tuple[object, ...], int] = {}  # largest stacks by stack key, after larger ones ran out of memory


def deal_device(device: str) -> None:
    """Set the device for jobs in this process that do not name one."""
    _worker["device"] = device


def stop_file(folder: SweepFolder, session: str) -> Path:
    """The file that asks a sweep's jobs to stop."""
    return folder.stacks / f"{session}.stop"


@cache
def planned_dataset(name: str, source: str, data_dir: str | None, allowances: tuple[str, ...]) -> Dataset:
    """Load a dataset of a sweep, once per process: stacks of one dataset follow each other.

    It is an error if a folder or file has other content than when the runs were planned, which gave it this name.
    """
    dataset = load_dataset(source, data_dir, **dict.fromkeys(allowances, True))
    if source not in DATASETS and dataset.name != name:
        raise SandmaskError(
            f"{source} has different content here than on the machine that planned the sweep ({dataset.name} instead "
            f"of {name}). Copy all of it, or rerun the sweep if the dataset was changed."
        )
    return dataset


def run_job(job: Job) -> Outcome:
    """Train a stack to its end, or until it is stopped.

    :param job: the stack and how to train it.
    """
    options = job.options
    load_plugins(options.plugins)
    specs = [RunSpec.from_json(spec) for spec in job.specs]
    ids = [spec.id for spec in specs]
    stack = stack_id(specs)
    folder = SweepFolder(Path(options.folder))
    folder.stacks.mkdir(parents=True, exist_ok=True)

    why_stop = partial(_why_stop, options, folder)
    if (state := why_stop()) is not None:
        return Outcome(state, stack)
    job = replace(job, work=_work_left(job, folder.checkpoint(stack), specs[0].steps))
    if _is_late(job, folder, specs[0]):
        return Outcome("late", stack)
    try:
        # SIGTERM takes effect after the locks are released: it ends a worker process and interrupts a driver.
        with deferred(signal.SIGTERM), claim(folder.stacks, stack, ids) as mine:
            # Checked while holding the claim: another process has either finished these runs or given them up.
            if not mine or folder.finished() & set(ids):
                return Outcome("taken", stack)
            try:
                return _Training(job, specs, folder, lambda: why_stop() is not None).run()
            except KeyboardInterrupt:
                if (state := why_stop()) is None:
                    raise
                return Outcome(state, stack)
            except SandmaskError as error:
                return Outcome("failed", stack, tuple(ids), str(error))
    except SandmaskError:  # concerns the whole folder; the driver reports it
        raise
    except Exception as error:  # noqa: BLE001 - other stacks continue
        return Outcome("failed", stack, tuple(ids), _explained(error, folder.stacks / f"{stack}.error.txt"))


def _why_stop(options: JobOptions, folder: SweepFolder) -> State | None:
    """The state of a job that has to stop now; None if it may go on.

    After the time limit it is "late", and the driver does not submit it again, even if its clock is behind this one.
    """
    if options.ends is not None and time.time() >= options.ends:
        return "late"
    return "stopped" if stop_requested() or stop_file(folder, options.session).exists() else None


def _work_left(job: Job, checkpoint: Path, steps: int) -> float:
    """The work of a job, without the steps before its checkpoint if there is one."""
    try:
        return job.work * (1 - int(load_metadata(checkpoint)["done"]) / steps) if checkpoint.exists() else job.work
    except (SandmaskError, KeyError, TypeError, ValueError):  # damaged, or another program has just removed it
        return job.work


def _is_late(job: Job, folder: SweepFolder, first: RunSpec) -> bool:
    """Whether a stack is not expected to finish in time."""
    if job.options.ends is None:
        return False
    seconds = expected_seconds(folder, job.options.session, first, job.work)
    return seconds is not None and time.time() + seconds > job.options.ends


def _explained(error: Exception, log: Path) -> str:
    """One line for the user. The traceback is written to `log`, except for errors of the file system."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        # For errors of the disk, name the folder: the line is then the same for every stack.
        of_disk = error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
        return f"{Path(error.filename).parent if of_disk else error.filename}: {error.strerror}"
    said = f"{type(error).__name__}: {error}"
    try:
        with replacing(log) as temporary:
            temporary.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return said
    return f"{said}; see {log}"


class _Training:
    """Trains the stack of a job, in parts if it does not fit into memory."""

    def __init__(self, job: Job, specs: Sequence[RunSpec], folder: SweepFolder, stop: Callable[[], bool]) -> None:
        self.options, self.specs, self.folder, self.stack = job.options, specs, folder, stack_id(specs)
        self.device = choose_device(job.options.device or _worker.get("device"))
        self.progress = ProgressWriter(
            folder,
            self.stack,
            specs,
            device=str(self.device),
            stop=stop,
            session=job.options.session,
            work=job.work,
        )
        self.progress.write("running", done=0)  # fails on a full or read-only disk, before time is spent on training
        self.dataset = planned_dataset(specs[0].dataset, job.source, job.options.data_dir, job.options.allowances)
        self.archives: dict[str, bytes] = {}
        self.fitting = len(specs) if job.options.cores is None else self._fitting(job.options.cores)

    def run(self) -> Outcome:
        first = self.specs[0]
        too_large = self._train_all(self.specs)
        with suppress(OSError):  # training does not need this file
            self.progress.write("memory" if too_large else "done", done=first.steps)
        if not too_large:
            return Outcome("done", self.stack, archives=self.archives)
        message = (
            f"{self.device} has too little memory for a single run of {first.algorithm}; "
            "try a smaller --hparam batch_size=..., or another --device"
        )
        return Outcome("memory", self.stack, tuple(too_large), message, self.archives)

    def _train_all(self, part: Sequence[RunSpec]) -> list[str]:
        """Train runs, in smaller parts if memory is short. Return the ids of runs that do not fit even alone."""
        key = stack_key(part[0])
        limit = min(self.fitting, _limits.get(key, len(part)))
        if len(part) > limit:
            parts = equal_parts(part, limit)
            split_or_remove(self.folder, self.folder.checkpoint(stack_id(part)), parts)
            return [run for each in parts for run in self._train_all(each)]
        try:
            records = self._train(part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            records = []  # continue outside of this block: the traceback of the error keeps tensors in memory
        if records:
            self._keep(part, records)
            return []
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _limits[key] = max(1, len(part) // 2)
        return [part[0].id] if len(part) == 1 else self._train_all(part)

    def _fitting(self, cores: int) -> int:
        """How many of the runs fit into a worker's share of the memory of this machine."""
        first, options = self.specs[0], self.options
        if len(self.specs) == 1:
            return 1
        sharing = 1 if self.device.type == "cuda" else max(1, usable_cores() // max(1, cores))
        room = SHARE * available_memory(self.device) / min(sharing, options.workers or sharing)

        def measured_bytes() -> float:
            if not options.calibrate:
                return GUESSED_BYTES
            try:
                return calibrate(first, self.dataset, self.device, fast=options.fast, weights=options.weights).bytes
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return GUESSED_BYTES

        return fitting(len(self.specs), work_of(first, self.dataset).numbers, room, measured_bytes)

    def _train(self, part: Sequence[RunSpec]) -> list[RunRecord]:
        options, name = self.options, stack_id(part)
        checkpoint = self.folder.checkpoint(name)
        train = partial(
            train_stack,
            part,
            self.dataset,
            self.device,
            checkpoint,
            weights=options.weights,
            compiled=options.compiled and trains_alone(part[0]),
            fast=options.fast,
            diagnostics=options.diagnostics,
            metrics=options.metrics,
            train_eval_limit=options.train_eval_limit,
            keep=options.keep_models,
            models=self.folder.models(name),
            on_progress=self.progress.follow(part),
            on_evaluation=None if options.pruner == "none" else Pruning(self.folder, part, options.pruner),
            checkpoint_seconds=options.checkpoint_seconds,
        )
        try:
            return train()
        except DamagedFileError:  # its stack starts over; this process holds the lock of these runs
            checkpoint.unlink(missing_ok=True)
            return train()

    def _keep(self, part: Sequence[RunSpec], records: Sequence[RunRecord]) -> None:
        """Write the records of finished runs, then remove the checkpoint, so that a crash in between loses nothing.

        Models are written before, by `train_stack`. If a search has stopped the stack, the runs that it did not prune
        keep a checkpoint, and the driver plans them again.
        """
        ended = [run for run in records if run.status != "running"]
        left = [run.spec for run in records if run.status == "running"]
        name = stack_id(run.spec for run in ended)
        path = self.folder.records(name)
        write_archive(ended, path)
        if self.options.loggers:
            for run in ended:
                log_record(run, self.options.loggers)
        split_or_remove(self.folder, self.folder.checkpoint(stack_id(part)), [left] if left else [])
        if self.options.carry:
            files = [path, self.folder.models(name)]
            self.archives |= {file.name: file.read_bytes() for file in files if file.exists()}
        self.progress.finish(ended)
