"""Plans of sweeps: runs, stacks, time, memory and disk."""

import html
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sandmask._text import counted
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.networks import NETWORKS
from sandmask.records import RunSpec, averages_of
from sandmask.sweeps._cost import (
    ARCHIVE_BYTES,
    GUESSED_BYTES,
    SHARE,
    Rates,
    Work,
    available_memory,
    calibrate,
    fitting,
    parameters_of,
    work_of,
)
from sandmask.sweeps._expand import Expansion
from sandmask.sweeps._job import JobOptions, planned_dataset
from sandmask.sweeps._stacks import Arrange, Cap, PlannedStack, balanced, group
from sandmask.training import choose_device, stack_key
from sandmask.training.specs import SHAPE_HPARAMS

if TYPE_CHECKING:
    import pandas as pd

GPU_RUNS = 16  # about this many runs of a small network fill a GPU
# Multiplications that take as long as the fixed costs of a step of one run, in stacks of 16 runs; for an H200, see
# results/h200/logs/spirals-fp32x3.txt.
CPU_STEP, GPU_STEP = 1e7, 2e8
MOST, MOST_ON_GPU = 64, 512  # runs in a stack; more do not train faster


MLP_SIZES = ("mlp_width", "mlp_depth")  # of networks that ask for them, and of discriminators


def _builds_with(network: str, hparam: str) -> bool:
    """Whether a network's size depends on one of `MLP_SIZES`."""
    return network in NETWORKS and hparam in inspect.signature(NETWORKS[network].build).parameters


def _kind(spec: RunSpec) -> tuple[str, ...]:
    return spec.dataset, spec.algorithm, spec.network, spec.precision


@dataclass(frozen=True)
class StackEstimate:
    """A planned stack, and the time, memory and disk space that it needs if it trains alone on a device.

    `seconds` is None if nothing was measured. For `full_seconds` of this time, the device is fully used, and stacks
    that share it must take turns.
    """

    stack: PlannedStack
    seconds: float | None
    memory_bytes: float
    disk_bytes: float
    full_seconds: float = 0.0

    @property
    def shape(self) -> str:
        """The shape of the stack as text: batch 64, width 256, depth 3."""
        first = self.stack.specs[0]
        words = [
            f"{name.removeprefix('mlp_').removesuffix('_size')} {first.hparams[name]:g}"
            for name in SHAPE_HPARAMS
            if name in first.hparams
        ]
        return ", ".join([*words, *(["two held out"] if len(first.test_envs) == 2 else [])])


class Estimator:
    """Estimates the time and the memory of stacks. A kind of runs (dataset, algorithm, network) is measured once.

    :param expansion: all runs of the sweep.
    :param options: options of its jobs.
    :param device: where stacks train.
    :param measure: measure a few steps; otherwise there are no times, and memory is a guess.
    :param elsewhere: the kind of device, "cpu" or "cuda", of workers on other machines: see `cap`.
    :param notice: called with messages for the user.
    """

    def __init__(
        self,
        expansion: Expansion,
        options: JobOptions,
        device: str,
        *,
        measure: bool = True,
        elsewhere: str | None = None,
        notice: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.device = choose_device(device, here=elsewhere is None)
        self.measure, self.options, self._notice = measure, options, notice
        self._elsewhere, self._on_gpu = elsewhere is not None, (elsewhere or self.device.type) == "cuda"
        self._expansion = expansion
        self._measured: dict[tuple[str, ...], Rates] = {}
        self._works: dict[tuple[object, ...], Work] = {}
        self._parameters: dict[tuple[object, ...], int] = {}

    def cap(self, missing: int, workers: int = 1, most: int | None = None) -> Cap:
        """Return the function that limits the size of stacks, so that they fit into memory and every worker has work.

        A stack that turns out too large for a GPU is halved there. Workers on other machines divide stacks themselves.

        :param missing: number of runs that are left to train.
        :param workers: number of stacks that train at a time.
        :param most: the user's own limit.
        """
        if most is not None and most < 1:
            raise SandmaskError(f"max_stack should be at least 1. Found {most}.")
        fair = max(1, -(-missing // workers))
        limit = min(fair, MOST_ON_GPU if self._on_gpu else MOST, fair if most is None else most)
        if self._elsewhere:
            return lambda members: min(len(members), limit)
        return lambda members: self._fitting(members[:limit], sharing=1 if self._on_gpu else workers)

    def _fitting(self, members: Sequence[RunSpec], sharing: int) -> int:
        """How many runs of one key fit into a worker's share of the free memory."""
        first, room = members[0], SHARE * available_memory(self.device) / sharing
        return fitting(len(members), self._work(first).numbers, room, lambda: self._number_bytes(first))

    def arrange(self, workers: int) -> Arrange:
        """Return the function that puts stacks into the order of training.

        :param workers: number of stacks that train at a time.
        """
        fill = GPU_RUNS if self._on_gpu else 1
        return lambda stacks: balanced(stacks, workers, lambda spec: self._work(spec).total, fill)

    def estimate(self, stack: PlannedStack) -> StackEstimate:
        """Estimate a stack."""
        first, runs = stack.specs[0], len(stack.specs)
        work, rates = self._work(first), self._rates(first)
        full = 0.0 if rates is None else runs * work.total * rates.seconds
        models = 0 if self.options.keep_models == "none" else 1 + len(averages_of(first.options))
        return StackEstimate(
            stack=stack,
            seconds=None if rates is None else first.steps * rates.step_seconds + full,
            memory_bytes=runs * (work.numbers * self._number_bytes(first)),
            disk_bytes=ARCHIVE_BYTES + runs * (work.record_bytes + models * work.model_bytes),
            full_seconds=full,
        )

    def step_work(self, spec: RunSpec) -> float:
        """The approximate work of a step of a run with its share of the evaluations, in multiplications."""
        return self._work(spec).total / spec.steps + (GPU_STEP if self._on_gpu else CPU_STEP)

    def _dataset(self, name: str) -> Dataset:
        return planned_dataset(name, self._expansion.sources[name], self.options.data_dir, self.options.allowances)

    def _work(self, spec: RunSpec) -> Work:
        key = stack_key(spec)
        if key not in self._works:
            dataset = self._dataset(spec.dataset)
            ignored = ("batch_size", *(name for name in MLP_SIZES if not _builds_with(spec.network, name)))
            network = stack_key(replace(spec, hparams={**spec.hparams, **dict.fromkeys(ignored, 1)}))
            if network not in self._parameters:  # building a large network takes seconds
                self._parameters[network] = parameters_of(spec, dataset)
            limit = self.options.train_eval_limit
            self._works[key] = work_of(spec, dataset, self._parameters[network], limit)
        return self._works[key]

    def _rates(self, spec: RunSpec) -> Rates | None:
        """Measured time and memory of the first run of this kind, which mostly has default hyperparameters.

        None without `measure`.
        """
        kind = _kind(spec)
        if self.measure and kind not in self._measured:
            self._notice(f"measuring a few steps of {spec.algorithm} on {spec.dataset}")
            first = next((run for run in self._expansion.runs if _kind(run) == kind), spec)
            dataset, fast, weights = self._dataset(spec.dataset), self.options.fast, self.options.weights
            self._measured[kind] = calibrate(first, dataset, self.device, fast=fast, weights=weights)
        return self._measured.get(kind)

    def _number_bytes(self, spec: RunSpec) -> float:
        """Bytes of memory for each number that a step of such a run keeps."""
        rates = self._rates(spec)
        return GUESSED_BYTES if rates is None else rates.bytes


@dataclass(frozen=True)
class Plan:
    """The missing runs of a sweep in stacks, and the time, memory and disk space that they need.

    `workers` stacks train at a time. They share `devices` devices, or each has its own if this is None. `notes` are for
    the user, for example on requests that give no runs.
    """

    runs: int
    done: int
    stacks: tuple[StackEstimate, ...]
    workers: int = 1
    notes: tuple[str, ...] = ()
    devices: int | None = None

    @property
    def seconds(self) -> float | None:
        """The approximate wall-clock time; None if nothing was measured.

        Several workers on one GPU hide the fixed costs of each other's steps, but do not compute faster together.
        """
        known = [each.seconds for each in self.stacks if each.seconds is not None]
        if len(known) < len(self.stacks):
            return None
        full = sum(each.full_seconds for each in self.stacks) / (self.devices or self.workers)
        return max(sum(known) / self.workers, full, *known, 0.0)

    @property
    def memory_bytes(self) -> float:
        """Memory of the largest stacks that train at a time."""
        largest = sorted((each.memory_bytes for each in self.stacks), reverse=True)
        return sum(largest[: self.workers])

    @property
    def disk_bytes(self) -> float:
        """Disk space of all records."""
        return sum(each.disk_bytes for each in self.stacks)

    def frame(self) -> "pd.DataFrame":
        """A row for each stack, in the order of training: dataset, algorithm, shape, runs, seconds, bytes."""
        import pandas as pd

        columns = ["stack", "dataset", "algorithm", "shape", "runs", "seconds", "memory_bytes", "disk_bytes"]
        rows = [
            (
                *(each.stack.id, each.stack.specs[0].dataset, each.stack.specs[0].algorithm, each.shape),
                *(len(each.stack.specs), each.seconds, each.memory_bytes, each.disk_bytes),
            )
            for each in self.stacks
        ]
        return pd.DataFrame(rows, columns=columns)

    def __repr__(self) -> str:
        took = "not measured" if self.seconds is None else f"{self.seconds:.0f} s"
        runs, stacks = counted(self.runs, "run"), counted(len(self.stacks), "stack")
        return f"Plan({runs}, {self.runs - self.done} missing in {stacks}, time: {took})"

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        said = html.escape(" ".join([repr(self), *self.notes]))
        return f"<p>{said}</p>{self.frame().to_html(index=False, border=0)}"


def make_plan(
    runs: Sequence[RunSpec],
    finished: set[str],
    estimator: Estimator,
    cap: Cap,
    workers: int = 1,
    notes: Sequence[str] = (),
    devices: int | None = None,
) -> Plan:
    """Plan the runs that are not finished.

    :param runs: all runs of the sweep.
    :param finished: ids of the finished runs.
    :param estimator: estimates time and memory of stacks.
    :param cap: function of the specs of a stack that returns its largest size.
    :param workers: number of stacks that train at a time.
    :param notes: notes for the user.
    :param devices: number of devices that the workers share; each has its own if not given.
    """
    missing = [run for run in runs if run.id not in finished]
    stacks = [estimator.estimate(stack) for stack in estimator.arrange(workers)(group(missing, cap))]
    return Plan(len(runs), len(runs) - len(missing), tuple(stacks), workers, tuple(notes), devices)
