"""The status of a sweep, which any process can read from its folder."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from sandmask._text import counted, printable
from sandmask.records import RunSpec
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._locks import claims, turn
from sandmask.sweeps._progress import Best, StackProgress, StackStatus, read_json, read_progress, write_json


@dataclass(frozen=True)
class Standing:
    """A row of the table so far, with training-domain selection among the existing checkpoints.

    `accuracy` is the mean over the cells (environment, trial) that have any; `cells` says how many those are.
    """

    dataset: str
    algorithm: str
    accuracy: float
    cells: int


@dataclass(frozen=True)
class SweepStatus:
    """Progress of a sweep: finished and running runs, speed, and accuracies so far.

    `seconds_left` weighs runs by their work if the process that trains has estimated it, and by their steps otherwise.
    It is None while no stack has a rate.
    """

    planned: int  # runs
    done: int
    running: int
    run_steps: int  # of all planned runs
    run_steps_done: int
    rate: float  # run-steps per second of all stacks that are being trained
    stacks: tuple[StackStatus, ...]
    standings: tuple[Standing, ...]
    seconds_left: float | None = None

    @property
    def missing(self) -> int:
        """Runs that are neither done nor running."""
        return self.planned - self.done - self.running

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "missing": self.missing}


def sweep_status(folder: SweepFolder, runs: Sequence[RunSpec]) -> SweepStatus:
    """Return the state of a sweep.

    :param folder: the sweep's folder.
    :param runs: all runs of the sweep.
    """
    finished = folder.finished()
    done = [run for run in runs if run.id in finished]
    left = [run for run in runs if run.id not in finished]
    training: dict[str, list[str]] = {}
    if folder.stacks.is_dir():
        with turn(folder.stacks):
            training = claims(folder.stacks)
    progress = read_progress(folder)
    stacks = tuple(each.status for each in progress if each.stack in training and each.state == "running")
    resumable = {each.stack for each in progress if folder.checkpoint(each.stack).exists()}
    run_steps = sum(run.steps for run in runs)
    run_steps_done = sum(run.steps for run in done) + sum(stack.runs * stack.done for stack in stacks)
    return SweepStatus(
        planned=len(runs),
        done=len(done),
        running=min(sum(stack.runs for stack in stacks), len(left)),
        run_steps=run_steps,
        run_steps_done=min(run_steps_done, run_steps),
        rate=sum(stack.rate for stack in stacks),
        stacks=stacks,
        standings=_standings(progress, training.keys() | resumable, done),
        seconds_left=_seconds_left(left, stacks, training, folder),
    )


def notes_on_changed_data(folder: SweepFolder, datasets: Collection[str]) -> list[str]:
    """Say how many finished runs are on an earlier version of a dataset, whose name changes with its files.

    :param folder: the sweep's folder.
    :param datasets: names of the sweep's datasets in records.
    """
    outdated: Counter[str] = Counter()
    for stack in read_progress(folder):
        if stack.state == "done" and stack.dataset not in datasets:
            outdated[stack.dataset] += stack.runs
    return [
        f"the files of {printable(name)} have changed, so the sweep no longer includes {counted(runs, 'run')} on it."
        for name, runs in outdated.items()
    ]


def write_work(folder: SweepFolder, work: Mapping[str, float]) -> None:
    """Write the work of a step of each missing run, in any unit, by the run's id: see `SweepStatus`."""
    write_json(folder.work, {"runs": work})


def _seconds_left(
    left: Sequence[RunSpec], stacks: Sequence[StackStatus], training: Mapping[str, Sequence[str]], folder: SweepFolder
) -> float | None:
    """The time of the work that is left at the present speed; at least that of the last stack to end.

    A run whose work is not known counts as the mean of the others. A stack without a rate is as fast as the others.
    """
    timed = [stack for stack in stacks if stack.rate > 0]
    if not timed:
        return None
    work: dict[str, float] = (read_json(folder.work) or {}).get("runs", {})  # of a step of each run
    mean = fmean([work[run.id] for run in left if run.id in work] or [1.0])

    def step_work(stack: StackStatus) -> float:
        return next((work[run] for run in training[stack.stack] if run in work), mean)

    work_done = sum(stack.runs * stack.done * step_work(stack) for stack in stacks)
    work_left = sum(run.steps * work.get(run.id, mean) for run in left) - work_done
    speed = sum(stack.rate * step_work(stack) for stack in timed) * len(stacks) / len(timed)
    last_to_end = max(stack.runs * (stack.steps - stack.done) / stack.rate for stack in timed)
    return max(work_left / speed, last_to_end)


def _standings(
    progress: Sequence[StackProgress], alive: Collection[str], done: Sequence[RunSpec]
) -> tuple[Standing, ...]:
    """The table so far, of stacks that are training or have a checkpoint (`alive`), and of runs that are done."""
    ended = {(run.dataset, run.algorithm, run.test_envs, run.trial_seed, run.hparams_seed) for run in done}
    latest: dict[tuple[object, ...], tuple[StackProgress, Best]] = {}
    for stack in sorted(progress, key=lambda each: each.updated):  # a run may have been trained in two stacks
        for best in stack.cells:
            run = (stack.dataset, stack.algorithm, (best.env,), best.trial, best.draw)
            if stack.stack in alive or run in ended:
                latest[run] = stack, best
    rows: defaultdict[tuple[str, str], dict[tuple[int, int], float]] = defaultdict(dict)
    # The best draw is the last one to be stored; if several are equal, the one with the highest number, as in tables.
    for stack, best in sorted(latest.values(), key=lambda pair: (pair[1].value, pair[1].draw)):
        rows[stack.dataset, stack.algorithm][best.env, best.trial] = best.held_out
    return tuple(Standing(*row, fmean(cells.values()), len(cells)) for row, cells in sorted(rows.items()))
