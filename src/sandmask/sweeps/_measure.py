"""A short measurement: how long a step and an evaluation take here, and how much memory, at two sizes."""

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from sandmask._memory import read_accounts
from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.sweeps._cost import Measured, work_of
from sandmask.training import Progress, stack_key, train_stack
from sandmask.training.specs import trains_alone

SECONDS = 2.0  # of steps, at one size
STEPS, EVERY = 31, 10
EXAMPLES, FEW_EXAMPLES = 256, 16  # of an environment: of small inputs, of images
SMALL_STACK, LARGER_STACK = 2, 6
_STATUS = Path("/proc/self/status")


class Sample(Dataset):
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
        """Whether the dataset is resident."""
        return self.base.resident

    def inputs(self, indices: Tensor) -> Tensor:
        """The examples with these numbers."""
        return self.base.inputs(self._kept[indices])

    def to(self, device: torch.device) -> "Sample":
        """The same on `device`."""
        return Sample(self.base.to(device), self.most)

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:
        """The examples as a training step sees them."""
        return self.base.training_inputs(self._kept[indices], key)

    def batches(self, indices: Iterable[Tensor], depth: int = 4) -> Iterator[Tensor]:
        """`inputs` of each element in turn."""
        return self.base.batches((self._kept[some] for some in indices), depth)

    def training_batches(self, requests: Iterable[tuple[Tensor, Tensor]], depth: int = 4) -> Iterator[Tensor]:
        """`training_inputs` of each (indices, key) in turn."""
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
    specs: Sequence[RunSpec], dataset: Dataset, device: torch.device, *, fast: bool, weights: str | None = None
) -> list[Measured]:
    """Measure runs of one kind (dataset, algorithm, network): few of the smallest shape, more of a middling one."""
    works = {stack_key(spec): work_of(spec, dataset).step for spec in specs}
    ordered = sorted(specs, key=lambda spec: works[stack_key(spec)])
    alone = trains_alone(specs[0])
    sample = Sample(dataset, FEW_EXAMPLES if alone else EXAMPLES)
    sizes = ((ordered[0], 1),) if alone else ((ordered[0], SMALL_STACK), (ordered[len(ordered) // 2], LARGER_STACK))
    return [
        _measure([_copy(spec, k) for k in range(count)], sample, device, fast=fast, weights=weights)
        for spec, count in sizes
    ]


def _copy(spec: RunSpec, number: int) -> RunSpec:
    return replace(spec, seed=number, steps=STEPS, checkpoint_every=EVERY)


def _measure(
    specs: Sequence[RunSpec], sample: Sample, device: torch.device, *, fast: bool, weights: str | None
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
    rates = sorted(seconds / steps for seconds, steps in plain or mixed)
    step = rates[len(rates) // 2]
    return step, max(0.0, min((seconds - step * steps for seconds, steps in mixed[1:] or mixed), default=0.0))
