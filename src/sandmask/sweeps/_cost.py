"""Time, memory and disk of stacks, from a few measurements: straight lines in the amount of work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.sweeps._calibrate import Measured, available_memory
from sandmask.sweeps._work import Work, evaluation_bytes, work_of

MOST = {"cpu": 64, "cuda": 512}  # runs in a stack; beyond these a machine is full
GUESSED_OVERHEAD = 8.0  # bytes used for a byte that is counted, where nothing was measured
LEAST_OVERHEAD = 2.0
SHARE = 0.7  # of the free memory that a stack may have
COMFORT = 0.25  # of it that needs no measurement
_ARCHIVE_BYTES = 12_000  # of a record file before it holds anything
_ACCURACY_BYTES, _METRIC_BYTES = 0.3, 4.0  # of one number, compressed


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
        """How long a stack takes, about."""
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


def disk(works: Sequence[Work]) -> float:
    """Bytes of a stack's records, about."""
    numbers = sum(work.evaluations * (2 * work.environments * _ACCURACY_BYTES + _METRIC_BYTES) for work in works)
    return _ARCHIVE_BYTES + numbers


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
