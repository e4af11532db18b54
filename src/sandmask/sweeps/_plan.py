"""What a sweep will take: runs, stacks, time, memory, disk."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.sweeps._calibrate import calibrate
from sandmask.sweeps._cost import GUESSED_OVERHEAD, CostModel, disk, largest_stack, memory
from sandmask.sweeps._stacks import STACKED_NETWORKS, Cap, PlannedStack, group
from sandmask.sweeps._work import Work, work_of
from sandmask.training import stack_key

Kind = tuple[str, str, str, str]


def _kind(spec: RunSpec) -> Kind:
    return spec.dataset, spec.algorithm, spec.network, spec.precision


@dataclass(frozen=True)
class StackEstimate:
    """A planned stack and what it takes; `seconds` is None where nothing was measured."""

    stack: PlannedStack
    seconds: float | None
    memory_bytes: float
    disk_bytes: float


class Estimator:
    """Knows what stacks cost on a device. Kinds of runs (dataset, algorithm, network) are measured when asked for."""

    def __init__(
        self,
        runs: Sequence[RunSpec],
        load: Callable[[str], Dataset],
        device: torch.device,
        *,
        fast: bool = True,
        weights: str | None = None,
        measure: bool = True,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.device, self.measure = device, measure
        self._runs: defaultdict[Kind, list[RunSpec]] = defaultdict(list)
        for run in runs:
            self._runs[_kind(run)].append(run)
        self._load, self._fast, self._weights, self._notice = cache(load), fast, weights, notice
        self._models: dict[Kind, CostModel] = {}
        self._works: dict[tuple[object, ...], Work] = {}

    def dataset(self, name: str) -> Dataset:
        """A dataset of the sweep, loaded once."""
        return self._load(name)

    def model(self, spec: RunSpec) -> CostModel | None:
        """The costs of runs like this one; None where measuring is not wanted."""
        kind = _kind(spec)
        if self.measure and kind not in self._models:
            self._notice(f"measuring a few steps of {spec.algorithm} on {spec.dataset}")
            dataset = self.dataset(spec.dataset)
            measured = calibrate(self._runs[kind], dataset, self.device, fast=self._fast, weights=self._weights)
            self._models[kind] = CostModel.fitted(measured)
        return self._models.get(kind)

    def cap(self, most: int | None = None) -> Cap:
        """How large stacks may be: as memory allows, and `most`."""

        def limit(members: Sequence[RunSpec]) -> int:
            spec = members[0]
            if spec.network not in STACKED_NETWORKS:
                return 1
            fits = largest_stack(members, self.dataset(spec.dataset), self.device, lambda: self._overhead(spec))
            return fits if most is None else min(fits, most)

        return limit

    def _overhead(self, spec: RunSpec) -> float:
        model = self.model(spec)
        return GUESSED_OVERHEAD if model is None else model.overhead

    def estimate(self, stack: PlannedStack) -> StackEstimate:
        """What a stack takes."""
        first = stack.specs[0]
        dataset = self.dataset(first.dataset)
        work = self._works.setdefault(stack_key(first), work_of(first, dataset))
        works = [work] * len(stack.specs)
        model = self.model(first)
        return StackEstimate(
            stack=stack,
            seconds=None if model is None else model.seconds(works, first.steps),
            memory_bytes=memory(self._overhead(first), works, dataset),
            disk_bytes=disk(works),
        )


@dataclass(frozen=True)
class Plan:
    """A sweep's missing runs in stacks, and what they take with `workers` of them at a time."""

    runs: int
    done: int
    stacks: tuple[StackEstimate, ...]
    workers: int = 1

    @property
    def seconds(self) -> float | None:
        """Wall-clock time, about; None where nothing was measured."""
        known = [each.seconds for each in self.stacks if each.seconds is not None]
        return sum(known) / self.workers if len(known) == len(self.stacks) else None

    @property
    def memory_bytes(self) -> float:
        """Of the largest stacks that train at a time."""
        largest = sorted((each.memory_bytes for each in self.stacks), reverse=True)
        return sum(largest[: self.workers])

    @property
    def disk_bytes(self) -> float:
        """Of all records."""
        return sum(each.disk_bytes for each in self.stacks)


def make_plan(runs: Sequence[RunSpec], finished: set[str], estimator: Estimator, cap: Cap, workers: int = 1) -> Plan:
    """Plan the runs that are not finished."""
    missing = [run for run in runs if run.id not in finished]
    stacks = [estimator.estimate(stack) for stack in group(missing, cap)]
    return Plan(len(runs), len(runs) - len(missing), tuple(stacks), workers)
