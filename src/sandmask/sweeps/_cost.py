"""Time, memory and disk of stacks, estimated from the specs of runs with measured factors."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

import numpy as np
import torch

from sandmask._memory import free_memory, read_accounts
from sandmask.datasets import Dataset
from sandmask.plugins import plugin_failures_named
from sandmask.records import RunSpec, averages_of
from sandmask.training.cuda_graph import Carry, Program
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.model_file import build_algorithm
from sandmask.training.precision import stack_settings
from sandmask.training.sampling import holdout_fraction
from sandmask.training.specs import trains_alone
from sandmask.training.stack import Stack

ARCHIVE_BYTES = 12_000  # of a record file without runs
_ACCURACY_BYTES, _METRIC_BYTES = 0.3, 4.0  # of one number, compressed
_CONVOLVED = 160  # about how many numbers per pixel the MNIST ConvNet keeps for the backward pass


@dataclass(frozen=True)
class Work:
    """The work of one run. It is the same for all runs of a stack."""

    step: float  # multiplications of a training step
    total: float  # multiplications of all steps and evaluations
    numbers: float  # kept in memory by a step: gradients of every environment, activations
    record_bytes: float
    model_bytes: float


def parameters_of(spec: RunSpec, dataset: Dataset) -> int:
    """The number of parameters of a run's network, which does not depend on the batch size."""
    return build_algorithm(spec, dataset, weights="none", dropout=False).network.numel


def work_of(
    spec: RunSpec, dataset: Dataset, parameters: int | None = None, train_eval_limit: int | None = None
) -> Work:
    """The work of a run on a dataset. `parameters` is the size of its network, if it is known."""
    parameters = parameters_of(spec, dataset) if parameters is None else parameters
    batch, n_envs = int(spec.hparams["batch_size"]), len(dataset.environments)
    n_train = n_envs - len(spec.test_envs)
    if len(dataset.input_shape) == 1:
        # Numbers of one example that a network keeps for the backward pass.
        kept = dataset.input_shape[0] + spec.hparams.get("mlp_depth", 3) * spec.hparams.get("mlp_width", 256)
        each = max(parameters, kept)
    else:  # a convolution uses its weights at every pixel; the unknown factor is the same for networks of one kind
        pixels = math.prod(dataset.input_shape[1:])
        kept, each = _CONVOLVED * pixels, parameters * pixels / 16
    step = n_train * batch * each
    evaluations = sum(1 for _ in evaluation_steps(spec.steps, spec.checkpoint_every))
    evaluated = evaluations * (1 + len(averages_of(spec.options))) * _evaluated(spec, dataset, train_eval_limit)
    return Work(
        step=step,
        total=spec.steps * step + evaluated * each / 3,  # a step also has a backward pass
        numbers=n_train * (parameters + batch * kept) + 4 * parameters,
        record_bytes=evaluations * (2 * n_envs * _ACCURACY_BYTES + _METRIC_BYTES),
        model_bytes=4 * parameters,
    )


def _evaluated(spec: RunSpec, dataset: Dataset, train_eval_limit: int | None) -> float:
    """The approximate number of examples that a run is evaluated on."""
    left_out = 0.0
    for env, size in enumerate(np.diff(dataset.bounds).tolist()):
        if train_eval_limit is not None and env not in spec.test_envs:
            left_out += max(0.0, (1 - holdout_fraction(spec)) * size - train_eval_limit)
    return dataset.bounds[-1] - left_out


SHARE = 0.7  # share of the free memory that stacks may use
GUESSED_BYTES = 32.0  # memory for a number that a step keeps, if nothing was measured; deliberately high


def fitting(runs: int, numbers: float, room: float, measured_bytes: Callable[[], float]) -> int:
    """Return how many runs of a stack fit into memory, at least one.

    Memory is measured only if the runs do not fit by a guess that is deliberately high.

    :param runs: number of runs.
    :param numbers: numbers that a step of one run keeps in memory, see `Work`.
    :param room: bytes that all runs together may use.
    :param measured_bytes: function that measures the memory of one number.
    """
    if runs * GUESSED_BYTES * numbers <= room:
        return runs
    return max(1, min(runs, int(room / (measured_bytes() * numbers))))


def available_memory(device: torch.device) -> float:
    """Free bytes, within the limits of a container; infinity if the system does not report them."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    free = free_memory()
    return float("inf") if free is None else float(free)


STACKS = (2, 6)  # numbers of runs in the stacks that are measured
STEPS, SECONDS = 31, 2.0  # limits of a measurement
TOGETHER = 10  # most steps per measurement of time: as many as a CUDA graph has
LEAST_BYTES = 8.0  # least memory for a number; a measurement may give less, if freed memory is reused
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Rates:
    """Measured time and memory of stacks on a device."""

    step_seconds: float  # of a step, independent of the number of runs
    seconds: float  # per multiplication
    bytes: float  # per number in memory


def calibrate(spec: RunSpec, dataset: Dataset, device: torch.device, *, fast: bool, weights: str | None) -> Rates:
    """Measure a few steps of runs like `spec`: in stacks of two sizes, or of a single run if it trains alone."""
    sizes = (1,) if trains_alone(spec) else STACKS
    before = _reset_peak(device)
    seconds = []
    for size in sizes:
        copies = [replace(spec, seed=number, steps=STEPS) for number in range(size)]
        seconds.append(_step_seconds(copies, dataset, device, fast=fast, weights=weights))
    used = _peak(device) - before
    largest, work = sizes[-1], work_of(spec, dataset)
    of_run = seconds[-1] / largest
    if len(sizes) > 1:  # a part of the time does not grow with the number of runs
        of_run = min(of_run, max(0.0, seconds[-1] - seconds[0]) / (largest - sizes[0]))
    return Rates(
        step_seconds=seconds[-1] - largest * of_run,
        seconds=of_run / work.step,
        bytes=max(LEAST_BYTES, used / (largest * work.numbers)),
    )


def _step_seconds(
    specs: Sequence[RunSpec], dataset: Dataset, device: torch.device, *, fast: bool, weights: str | None
) -> float:
    """The median time of a step of a stack, in seconds."""
    took: list[float] = []
    with plugin_failures_named(), stack_settings(specs[0].precision, device):
        stack = Stack(specs, dataset, device, weights=weights)
        diverged_at = torch.full((len(specs),), -1, device=device)
        program = Program(stack, Carry(stack.init(), {}, diverged_at), fast=fast)
        begin = time.monotonic()
        try:
            # The first step warms up, and the second call may capture a graph.
            while program.done < STEPS and (len(took) < 3 or time.monotonic() - begin < SECONDS):
                start, done = time.monotonic(), program.done
                program.advance(min(TOGETHER, STEPS - done))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took.append((time.monotonic() - start) / (program.done - done))
        finally:
            program.close()
    return median_low(took[1:])


def _reset_peak(device: torch.device) -> float:
    """Start to measure peak memory. Return the memory in use."""
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
