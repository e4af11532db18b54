"""Time, memory and disk of stacks: proportional to numbers that a run's spec gives, by factors that are measured."""

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median_high

import torch
from torch import Tensor

from sandmask._memory import free_memory, read_accounts
from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.training import Progress, stack_key, train_stack
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.model_file import build_algorithm
from sandmask.training.specs import trains_alone

GUESSED_OVERHEAD = 8.0  # bytes used for a byte that is counted, where nothing was measured
LEAST_OVERHEAD = 2.0
_ARCHIVE_BYTES = 12_000  # of a record file before it holds anything
_ACCURACY_BYTES, _METRIC_BYTES = 0.3, 4.0  # of one number, compressed
_CONVOLVED = 160  # times the pixels: numbers that the MNIST ConvNet keeps of an example, about
_VECTOR = 1024  # an evaluation chunk's share of an example that is a vector
_EVALUATION_BYTES = 4 * 2**30  # more than this the evaluator does not take at once


@dataclass(frozen=True)
class Work:
    """The work of one run. All runs of a stack have the same."""

    step: float  # multiplications of a training step
    evaluation: float  # multiplications of an evaluation
    numbers: float  # that a step keeps in memory: gradients of every environment, activations
    evaluated: int  # numbers that an evaluation of all examples at once would keep
    evaluations: int
    environments: int
    parameters: int

    def memory(self, runs: int, overhead: float) -> float:
        """Bytes that a stack takes while it trains, about. Evaluations take as many examples as a fixed room holds."""
        return 4 * overhead * runs * self.numbers + min(_EVALUATION_BYTES, 8 * runs * self.evaluated)

    def disk(self, runs: int, models: int) -> float:
        """Bytes of a stack's records, about, and of so many models of each run."""
        records = self.evaluations * (2 * self.environments * _ACCURACY_BYTES + _METRIC_BYTES)
        return _ARCHIVE_BYTES + runs * (records + 4 * models * self.parameters)


def work_of(spec: RunSpec, dataset: Dataset) -> Work:
    """The work of a run on a dataset."""
    network = build_algorithm(spec, dataset, weights="none", dropout=False).network
    batch, n_examples = int(spec.hparams["batch_size"]), dataset.bounds[-1]
    n_train = len(dataset.environments) - len(spec.test_envs)
    if len(dataset.input_shape) == 1:
        # Numbers that a network keeps of one example, for the way back.
        kept = dataset.input_shape[0] + spec.hparams.get("mlp_depth", 3) * spec.hparams.get("mlp_width", 256)
        each, evaluated = max(network.numel, kept), _VECTOR
    else:  # a convolution uses its weights at every place; all networks of one kind are off by the same factor
        pixels = math.prod(dataset.input_shape[1:])
        kept, each, evaluated = _CONVOLVED * pixels, network.numel * pixels / 16, 64 * pixels
    return Work(
        step=n_train * batch * each,
        evaluation=n_examples * each,
        numbers=n_train * (network.numel + batch * kept) + 4 * network.numel,
        evaluated=n_examples * evaluated,
        evaluations=sum(1 for _ in evaluation_steps(spec.steps, spec.checkpoint_every)),
        environments=len(dataset.environments),
        parameters=network.numel,
    )


def available_memory(device: torch.device) -> float:
    """Bytes that are free now, within the limits of a container; infinite where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return float("inf") if free is None else float(free)


@dataclass(frozen=True)
class Measured:
    """One stack of `runs`, measured."""

    runs: int
    work: Work
    step_seconds: float
    evaluation_seconds: float
    bytes: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step and of an evaluation are a + b x work; memory is proportional to the numbers kept."""

    step: tuple[float, float]
    evaluation: tuple[float, float]
    overhead: float

    @classmethod
    def fitted(cls, measured: Sequence[Measured]) -> "CostModel":
        """The model through one or two measurements."""
        steps = [(each.runs * each.work.step, each.step_seconds) for each in measured]
        evaluations = [(each.runs * each.work.evaluation, each.evaluation_seconds) for each in measured]
        used = max(each.bytes / (4 * each.runs * each.work.numbers) for each in measured)
        return cls(_line(steps), _line(evaluations), max(used, LEAST_OVERHEAD))

    def seconds(self, work: Work, runs: int, steps: int) -> float:
        """The estimated time of a stack."""
        step = self.step[0] + self.step[1] * runs * work.step
        evaluation = self.evaluation[0] + self.evaluation[1] * runs * work.evaluation
        return steps * step + work.evaluations * evaluation


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x, neither below zero, through the first and the last point."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else y1 / x1
    slope = min(max(slope, 0.0), y1 / x1)
    return max(0.0, y1 - slope * x1), slope


SECONDS = 2.0  # of steps, at one size
STEPS, EVERY = 31, 10
EXAMPLES, FEW_EXAMPLES = 256, 16  # of an environment: of small inputs, of images
SMALL_STACK, LARGER_STACK = 2, 6
_STATUS = Path("/proc/self/status")


class _Sample(Dataset):
    """A dataset cut down to at most `most` examples of each environment; otherwise the dataset itself."""

    def __init__(self, base: Dataset, most: int) -> None:
        self.base, self.most = base, most
        self.name, self.environments, self.classes = base.name, base.environments, base.classes
        self.input_shape, self.domains = base.input_shape, base.domains
        starts = base.bounds[:-1]
        sizes = [min(most, stop - start) for start, stop in zip(starts, base.bounds[1:], strict=True)]
        self.bounds = tuple(torch.tensor([0, *sizes]).cumsum(0).tolist())
        kept = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._kept = torch.cat(kept).to(base.labels.device)
        self.labels = base.labels[self._kept]

    @property
    def resident(self) -> bool:
        return self.base.resident

    def inputs(self, indices: Tensor) -> Tensor:
        return self.base.inputs(self._kept[indices])

    def to(self, device: torch.device) -> "_Sample":
        return _Sample(self.base.to(device), self.most)

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:
        return self.base.training_inputs(self._kept[indices], key)

    def batches(self, indices: Iterable[Tensor], depth: int = 4) -> Iterator[Tensor]:
        return self.base.batches((self._kept[some] for some in indices), depth)

    def training_batches(self, requests: Iterable[tuple[Tensor, Tensor]], depth: int = 4) -> Iterator[Tensor]:
        return self.base.training_batches(((self._kept[some], key) for some, key in requests), depth)


def _reset_peak(device: torch.device) -> float:
    """Start measuring a peak; what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return float(read_accounts(_STATUS, "VmRSS") or 0)


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(read_accounts(_STATUS, "VmHWM") or 0)


class _EnoughError(Exception):
    """Stops a measurement that has seen what it needs."""


def calibrate(
    specs: Sequence[RunSpec], dataset: Dataset, device: torch.device, *, fast: bool, weights: str | None
) -> CostModel:
    """Measure runs of one kind (dataset, algorithm, network): few of the smallest shape, more of a middling one."""
    works = {stack_key(spec): work_of(spec, dataset).step for spec in specs}
    ordered = sorted(specs, key=lambda spec: works[stack_key(spec)])
    if trains_alone(specs[0]):
        sample, sizes = _Sample(dataset, FEW_EXAMPLES), [(ordered[0], 1)]
    else:
        sample = _Sample(dataset, EXAMPLES)
        sizes = [(ordered[0], SMALL_STACK), (ordered[len(ordered) // 2], LARGER_STACK)]
    measured = []
    for spec, count in sizes:
        copies = [replace(spec, seed=number, steps=STEPS, checkpoint_every=EVERY) for number in range(count)]
        measured.append(_measure(copies, sample, device, fast=fast, weights=weights))
    return CostModel.fitted(measured)


def _measure(
    specs: Sequence[RunSpec], sample: _Sample, device: torch.device, *, fast: bool, weights: str | None
) -> Measured:
    seen: list[tuple[float, int]] = []
    begin = time.monotonic()

    def on_progress(progress: Progress) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        if progress.accuracies is None:
            seen.append((now, progress.done))
        if now - begin > SECONDS and progress.done > 3:
            raise _EnoughError

    before = _reset_peak(device)
    with tempfile.TemporaryDirectory() as folder, suppress(_EnoughError):
        train_stack(
            specs, sample, device, Path(folder) / "c.safetensors", weights=weights, fast=fast, on_progress=on_progress
        )
    used = _peak(device) - before
    step, evaluation = _apart(seen)
    return Measured(len(specs), work_of(specs[0], sample), step, evaluation, used)


def _apart(seen: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Seconds of a step and of an evaluation: some gaps between calls have an evaluation in them."""
    plain: list[tuple[float, int]] = []
    mixed: list[tuple[float, int]] = []
    for (t0, d0), (t1, d1) in pairwise(seen):
        evaluated = (d0 - 1) % EVERY == 0
        (mixed if evaluated else plain).append((t1 - t0, d1 - d0))
    step = median_high(seconds / steps for seconds, steps in plain or mixed)
    return step, max(0.0, min((seconds - step * steps for seconds, steps in mixed[1:] or mixed), default=0.0))
