"""Time, memory and disk of stacks: proportional to numbers that a run's spec gives, by factors that are measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sandmask._memory import free_memory
from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.stack import build_algorithm

MOST = {"cpu": 64, "cuda": 512}  # runs in a stack; beyond these a machine is full
GUESSED_OVERHEAD = 8.0  # bytes used for a byte that is counted, where nothing was measured
LEAST_OVERHEAD = 2.0
SHARE = 0.7  # of the free memory that a stack may have
COMFORT = 0.25  # of it that needs no measurement
_ARCHIVE_BYTES = 12_000  # of a record file before it holds anything
_ACCURACY_BYTES, _METRIC_BYTES = 0.3, 4.0  # of one number, compressed
_CONVOLVED = 160  # times the pixels: numbers that the MNIST ConvNet keeps of an example, about
_VECTOR = 1024  # an evaluation chunk's share of an example that is a vector
_EVALUATION_BYTES = 4 * 2**30  # more than this the evaluator does not take at once


@dataclass(frozen=True)
class Work:
    """The work of one run."""

    step: float  # multiplications of a training step
    evaluation: float  # multiplications of an evaluation
    numbers: float  # that a step keeps in memory: gradients of every environment, activations
    evaluations: int
    examples: int
    environments: int
    parameters: int


def work_of(spec: RunSpec, dataset: Dataset) -> Work:
    """The work of a run on a dataset."""
    network = build_algorithm(spec, dataset, weights="none", dropout=False).network
    batch = int(spec.hparams["batch_size"])
    n_train = len(dataset.environments) - len(spec.test_envs)
    kept = _kept(spec, dataset)
    each = max(network.numel, kept) if len(dataset.input_shape) == 1 else _image_work(network.numel, dataset)
    n_examples = dataset.bounds[-1]
    return Work(
        step=n_train * batch * each,
        evaluation=n_examples * each,
        numbers=n_train * (network.numel + batch * kept) + 4 * network.numel,
        evaluations=sum(1 for _ in evaluation_steps(spec.steps, spec.checkpoint_every)),
        examples=n_examples,
        environments=len(dataset.environments),
        parameters=network.numel,
    )


def _kept(spec: RunSpec, dataset: Dataset) -> float:
    """Numbers that a network keeps of one example, for the way back."""
    if len(dataset.input_shape) == 1:
        return dataset.input_shape[0] + spec.hparams.get("mlp_depth", 3) * spec.hparams.get("mlp_width", 256)
    return _CONVOLVED * math.prod(dataset.input_shape[1:])


def _image_work(numel: int, dataset: Dataset) -> float:
    """A convolution uses its weights at every place; all networks of one kind are off by the same factor."""
    return numel * math.prod(dataset.input_shape[1:]) / 16


def evaluation_bytes(works: Sequence[Work], dataset: Dataset) -> float:
    """The memory of a stack's evaluation, which takes as many examples at once as fit into a fixed room."""
    each = _VECTOR if len(dataset.input_shape) == 1 else 64 * math.prod(dataset.input_shape[1:])
    return float(min(_EVALUATION_BYTES, 8 * len(works) * works[0].examples * each))


@dataclass(frozen=True)
class Measured:
    """One stack of `runs`, measured."""

    runs: int
    work: Work
    step_seconds: float
    evaluation_seconds: float
    bytes: float


def available_memory(device: torch.device) -> float:
    """Bytes that are free now, within the limits of a container; infinite where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return float("inf") if free is None else float(free)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step and of an evaluation are a + b x work; memory is proportional to the numbers kept."""

    step: tuple[float, float]
    evaluation: tuple[float, float]
    overhead: float = GUESSED_OVERHEAD

    @classmethod
    def fitted(cls, measured: Sequence[Measured]) -> "CostModel":
        """The model through one or two measurements."""
        steps = [(each.runs * each.work.step, each.step_seconds) for each in measured]
        evaluations = [(each.runs * each.work.evaluation, each.evaluation_seconds) for each in measured]
        used = max(each.bytes / (4 * each.runs * each.work.numbers) for each in measured)
        return cls(_line(steps), _line(evaluations), max(used, LEAST_OVERHEAD))

    def seconds(self, works: Sequence[Work], steps: int) -> float:
        """The estimated time of a stack."""
        step = self.step[0] + self.step[1] * sum(work.step for work in works)
        evaluation = self.evaluation[0] + self.evaluation[1] * sum(work.evaluation for work in works)
        return steps * step + works[0].evaluations * evaluation


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x, neither below zero, through the first and the last point."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else y1 / x1
    slope = min(max(slope, 0.0), y1 / x1)
    return max(0.0, y1 - slope * x1), slope


def memory(overhead: float, works: Sequence[Work], dataset: Dataset) -> float:
    """Bytes that a stack takes while it trains, about."""
    return 4 * overhead * sum(work.numbers for work in works) + evaluation_bytes(works, dataset)


def disk(works: Sequence[Work], models: int = 0) -> float:
    """Bytes of a stack's records, about, and of so many `models` of each run."""
    numbers = sum(work.evaluations * (2 * work.environments * _ACCURACY_BYTES + _METRIC_BYTES) for work in works)
    return _ARCHIVE_BYTES + numbers + 4 * models * sum(work.parameters for work in works)


def largest_stack(
    members: Sequence[RunSpec], dataset: Dataset, device: torch.device, overhead: Callable[[], float]
) -> int:
    """How many runs of one key fit into the free memory; `overhead` is asked for only where it is close."""
    most = min(MOST.get(device.type, MOST["cpu"]), len(members))
    work, free = work_of(members[0], dataset), available_memory(device)
    if memory(GUESSED_OVERHEAD, [work] * most, dataset) <= COMFORT * free:
        return most
    factor = overhead()
    room = SHARE * free - evaluation_bytes([work] * most, dataset)
    return max(1, min(most, int(room / (4 * factor * work.numbers))))
