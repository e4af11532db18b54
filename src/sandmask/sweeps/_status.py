"""Status of a sweep, read from its folder by any process."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sandmask.records import RunSpec
from sandmask.sweeps._folder import SweepFolder, read_json
from sandmask.sweeps._locks import claims, turn

_CELL = {"env": int, "trial": int, "draw": int, "value": float, "held_out": float}


@dataclass(frozen=True)
class StackStatus:
    """A stack that is being trained now."""

    stack: str
    dataset: str
    algorithm: str
    runs: int
    done: int  # steps
    steps: int
    rate: float  # run-steps a second
    device: str
    host: str
    updated: float  # when, in seconds since 1970


@dataclass(frozen=True)
class Standing:
    """A row of the table so far: training-domain selection among the checkpoints that there are.

    `accuracy` is the mean over the cells (environment, trial) that have any; `cells` says how many those are.
    """

    dataset: str
    algorithm: str
    accuracy: float
    cells: int


@dataclass(frozen=True)
class SweepStatus:
    """Progress of a sweep: finished and running runs, speed, and accuracies so far."""

    planned: int  # runs
    done: int
    running: int
    run_steps: int  # of all planned runs
    run_steps_done: int
    rate: float  # run-steps a second, summed over stacks under way
    stacks: tuple[StackStatus, ...]
    standings: tuple[Standing, ...]

    @property
    def missing(self) -> int:
        """Runs that are neither done nor under way."""
        return self.planned - self.done - self.running

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None while nothing is known of it."""
        return (self.run_steps - self.run_steps_done) / self.rate if self.rate > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "missing": self.missing, "seconds_left": self.seconds_left}


def sweep_status(folder: SweepFolder, runs: Sequence[RunSpec]) -> SweepStatus:
    """Return the state of a sweep.

    :param folder: the sweep's folder.
    :param runs: all runs of the sweep.
    """
    finished = folder.finished()
    live = _live(folder)
    progress = _progress(folder)
    stacks = tuple(_stack_status(each) for each in progress if each["stack"] in live and each["state"] == "running")
    done = [run for run in runs if run.id in finished]
    under_way = min(sum(stack.runs for stack in stacks), len(runs) - len(done))
    run_steps = sum(run.steps for run in runs)
    steps_done = sum(run.steps for run in done) + sum(stack.runs * stack.done for stack in stacks)
    return SweepStatus(
        planned=len(runs),
        done=len(done),
        running=under_way,
        run_steps=run_steps,
        run_steps_done=min(steps_done, run_steps),
        rate=sum(stack.rate for stack in stacks),
        stacks=stacks,
        standings=_standings(progress),
    )


def _live(folder: SweepFolder) -> set[str]:
    """The stacks that a process is at."""
    if not folder.stacks.is_dir():
        return set()
    with turn(folder.stacks):
        return set(claims(folder.stacks))


def _progress(folder: SweepFolder) -> list[dict[str, Any]]:
    """Read the progress files of stacks; invalid files are ignored."""
    found = (read_json(path) for path in sorted(folder.stacks.glob("[!.]*.progress.json")))
    return [each for each in found if each is not None and _is_progress(each)]


def _is_progress(data: dict[str, Any]) -> bool:
    cells = data.get("cells")
    return (
        _fits(data, {**{name: each.type for name, each in StackStatus.__dataclass_fields__.items()}, "state": str})
        and data["steps"] > 0
        and isinstance(cells, list)
        and all(isinstance(cell, dict) and _fits(cell, _CELL) for cell in cells)
    )


def _fits(data: dict[str, Any], kinds: Mapping[str, Any]) -> bool:
    """Whether every name is there with a value of its kind; a whole number is a number too."""
    return all(
        isinstance(data.get(name), int | float if kind is float else kind) and data[name] == data[name]
        for name, kind in kinds.items()
    )


def _stack_status(data: dict[str, Any]) -> StackStatus:
    return StackStatus(**{name: data[name] for name in StackStatus.__dataclass_fields__})


def _standings(progress: Sequence[dict[str, Any]]) -> tuple[Standing, ...]:
    best: defaultdict[tuple[str, str], dict[tuple[int, int], tuple[float, int, float]]] = defaultdict(dict)
    for stack in progress:
        cells = best[stack["dataset"], stack["algorithm"]]
        for run in stack["cells"]:
            place = run["env"], run["trial"]
            offer = run["value"], run["draw"], run["held_out"]  # of ties, the last draw: as the tables have it
            cells[place] = max(cells.get(place, offer), offer)
    return tuple(
        Standing(dataset, algorithm, sum(held_out for _, _, held_out in cells.values()) / len(cells), len(cells))
        for (dataset, algorithm), cells in sorted(best.items())
        if cells
    )
