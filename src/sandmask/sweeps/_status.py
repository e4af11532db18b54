"""Progress files of stacks, which workers write, and the status of a sweep, which any process can read."""

import json
import os
import socket
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sandmask._files import replacing
from sandmask.records import RunRecord, RunSpec
from sandmask.selection import training_domain
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._locks import claims, turn
from sandmask.training import Accuracies, Progress
from sandmask.training.keeping import training_mean

WRITE_SECONDS = 1.0
WARM_UPS = 4  # reports of a loop before its rate is measured: the first steps and evaluations compile kernels
MARGIN = 1.1  # of the time that a stack is expected to take
_CHECKSUM = "crc32"


class StackProgress:
    """Writes the progress file of a stack about once a second, and calls `stop` as often.

    The best accuracies are those that training-domain selection would choose now, for each run.
    """

    def __init__(
        self,
        folder: SweepFolder,
        stack: str,
        specs: Sequence[RunSpec],
        *,
        device: str,
        stop: Callable[[], bool],
        session: str = "",
        work: float = 0.0,
    ) -> None:
        self.path, self.stop, self._began = folder.progress(stack), stop, time.monotonic()
        first = specs[0]
        self.fields: dict[str, Any] = {
            "stack": stack,
            "dataset": first.dataset,
            "algorithm": first.algorithm,
            "runs": len(specs),
            "steps": first.steps,
            "device": device,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "session": session,
            "work": work,
        }
        self.cells: dict[str, dict[str, Any]] = {}

    def write(self, state: str, *, done: int, rate: float = 0.0) -> None:
        """Write the file now."""
        now = {"state": state, "updated": time.time(), "done": done, "rate": rate, "cells": list(self.cells.values())}
        now["seconds"] = time.monotonic() - self._began
        _write_json(self.path, {**self.fields, **now})

    def follow(self, specs: Sequence[RunSpec]) -> Callable[[Progress], None]:
        """A function for `on_progress` of the loop that trains these runs of the stack."""
        self.fields["runs"] = len(specs)
        reports, start, first, written = 0, 0.0, 0, 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal reports, start, first, written
            if progress.accuracies is not None:
                self._see(specs, progress.accuracies)
            now = time.monotonic()
            reports += 1
            if reports <= WARM_UPS:
                start, first = now, progress.done
            if now - written > WRITE_SECONDS:
                written = now
                rate = (progress.done - first) * len(specs) / (now - start) if now > start else 0.0
                with suppress(OSError):  # training does not need this file
                    self.write("running", done=progress.done, rate=rate)
                if self.stop():
                    raise KeyboardInterrupt

        return on_progress

    def finish(self, records: Sequence[RunRecord]) -> None:
        """Replace the accuracies of finished runs by the final ones."""
        for record in records:
            if len(record.steps) and len(record.spec.test_envs) == 1:
                choice = training_domain(record)
                assert choice is not None
                held_out = record.accuracy_in[choice.index, record.spec.test_envs[0]]
                self.cells.pop(record.spec.id, None)
                self._keep(record.spec, choice.value[0], float(held_out))

    def _see(self, specs: Sequence[RunSpec], accuracies: Accuracies) -> None:
        """Keep the best mean "out" accuracy over the training environments, and the held-out accuracy with it."""
        for k, spec in enumerate(specs):
            held_out = float(accuracies.inside[k, spec.test_envs[0]])
            self._keep(spec, training_mean(accuracies.outside[k], spec), held_out)

    def _keep(self, spec: RunSpec, value: float, held_out: float) -> None:
        if len(spec.test_envs) != 1 or not np.isfinite(value):
            return
        known = self.cells.get(spec.id)
        if known is None or value > known["value"]:
            self.cells[spec.id] = {
                "env": spec.test_envs[0],
                "trial": spec.trial_seed,
                "draw": spec.hparams_seed,
                "value": value,
                "held_out": held_out,
            }


@dataclass(frozen=True)
class StackStatus:
    """A stack that is being trained now."""

    stack: str
    dataset: str
    algorithm: str
    runs: int
    done: int  # steps
    steps: int
    rate: float  # run-steps per second
    device: str
    host: str
    updated: float  # time of the last update, in seconds since 1970


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
    training: dict[str, list[str]] = {}
    if folder.stacks.is_dir():
        with turn(folder.stacks):
            training = claims(folder.stacks)
    found = map(_read_json, sorted(folder.stacks.glob("[!.]*.progress.json")))
    progress = [data for data in found if data is not None]
    stacks = tuple(
        StackStatus(**{each.name: data[each.name] for each in fields(StackStatus)})
        for data in progress
        if data["stack"] in training and data["state"] == "running"
    )
    done = [run for run in runs if run.id in finished]
    run_steps = sum(run.steps for run in runs)
    steps_done = sum(run.steps for run in done) + sum(stack.runs * stack.done for stack in stacks)
    alive = {data["stack"] for data in progress if folder.checkpoint(data["stack"]).exists()} | training.keys()
    return SweepStatus(
        planned=len(runs),
        done=len(done),
        running=min(sum(stack.runs for stack in stacks), len(runs) - len(done)),
        run_steps=run_steps,
        run_steps_done=min(steps_done, run_steps),
        rate=sum(stack.rate for stack in stacks),
        stacks=stacks,
        standings=_standings(progress, alive, done),
        seconds_left=_seconds_left([run for run in runs if run.id not in finished], stacks, training, folder),
    )


def write_work(folder: SweepFolder, work: Mapping[str, float]) -> None:
    """Write the work of a step of each missing run, in any unit, by the run's id: see `SweepStatus`."""
    _write_json(folder.work, {"runs": work})


def expected_seconds(folder: SweepFolder, session: str, spec: RunSpec, work: float) -> float | None:
    """The time that a stack may take, by those of the same call that are done; None while there are none.

    Stacks of the same dataset and algorithm count, and the others while there are none of these.

    :param folder: the sweep's folder.
    :param session: the call's session: see `JobOptions`.
    :param spec: spec of a run of the stack.
    :param work: the work of the stack, in the unit of the others'.
    """
    found = map(_read_json, folder.stacks.glob("[!.]*.progress.json"))
    done = [data for data in found if data and data["state"] == "done" and data.get("session") == session]
    like = [data for data in done if (data["dataset"], data["algorithm"]) == (spec.dataset, spec.algorithm)]
    timed = [(data["seconds"], data["work"]) for data in like or done if data["work"] > 0]
    return MARGIN * work * sum(took for took, _ in timed) / sum(of for _, of in timed) if timed else None


def _seconds_left(
    left: Sequence[RunSpec], stacks: Sequence[StackStatus], training: Mapping[str, Sequence[str]], folder: SweepFolder
) -> float | None:
    """The time of the work that is left at the present speed; at least that of the last stack to end.

    A run whose work is not known counts as the mean of the others. A stack without a rate is as fast as the others.
    """
    timed = [stack for stack in stacks if stack.rate > 0]
    if not timed:
        return None
    work: dict[str, float] = (_read_json(folder.work) or {}).get("runs", {})
    mean = fmean([work[run.id] for run in left if run.id in work] or [1.0])
    of_step = {stack.stack: next((work[run] for run in training[stack.stack] if run in work), mean) for stack in stacks}
    work_left = sum(run.steps * work.get(run.id, mean) for run in left)
    work_left -= sum(stack.runs * stack.done * of_step[stack.stack] for stack in stacks)
    rate = sum(stack.rate * of_step[stack.stack] for stack in timed) * len(stacks) / len(timed)
    return max(work_left / rate, *(stack.runs * (stack.steps - stack.done) / stack.rate for stack in timed))


def _standings(
    progress: Sequence[dict[str, Any]], alive: Collection[str], done: Sequence[RunSpec]
) -> tuple[Standing, ...]:
    """The table so far, of stacks that are training or have a checkpoint (`alive`), and of runs that are done."""
    ended = {(run.dataset, run.algorithm, run.test_envs, run.trial_seed, run.hparams_seed) for run in done}
    latest: defaultdict[tuple[str, str], dict[tuple[int, int, int], tuple[float, float]]] = defaultdict(dict)
    for stack in sorted(progress, key=lambda data: data["updated"]):  # a run may have been trained in two stacks
        row = stack["dataset"], stack["algorithm"]
        for run in stack["cells"]:
            env, trial, draw = run["env"], run["trial"], run["draw"]
            if stack["stack"] in alive or (*row, (env,), trial, draw) in ended:
                latest[row][env, trial, draw] = run["value"], run["held_out"]
    standings = []
    for (dataset, algorithm), results in sorted(latest.items()):
        best: dict[tuple[int, int], tuple[float, int, float]] = {}
        for (env, trial, draw), (value, held_out) in results.items():
            offer = value, draw, held_out  # of ties, the last draw: as the tables have it
            best[env, trial] = max(best.get((env, trial), offer), offer)
        standings.append(Standing(dataset, algorithm, fmean(each[-1] for each in best.values()), len(best)))
    return tuple(standings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**value, _CHECKSUM: _checksum(value)}), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a file of `_write_json`; None if it does not exist, is damaged or cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.pop(_CHECKSUM, None) != _checksum(value):
        return None
    return value


def _checksum(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value).encode())
