"""Progress files of stacks, which workers write, and the status of a sweep, which any process can read."""

import json
import os
import socket
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from sandmask._files import replacing
from sandmask.records import RunRecord, RunSpec
from sandmask.selection import training_domain
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._locks import claims, turn
from sandmask.training import Accuracies, Progress

WRITE_SECONDS = 1.0
_CHECKSUM = "crc32"


class StackProgress:
    """Writes the progress file of a stack about once a second, and calls `stop` as often.

    The best accuracies are those that training-domain selection would choose now, for each run.
    """

    def __init__(
        self, folder: SweepFolder, stack: str, specs: Sequence[RunSpec], *, device: str, stop: Callable[[], bool]
    ) -> None:
        self.path, self.stop = folder.progress(stack), stop
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
        }
        self.cells: dict[str, dict[str, Any]] = {}

    def write(self, state: str, *, done: int, rate: float = 0.0) -> None:
        """Write the file now."""
        now = {"state": state, "updated": time.time(), "done": done, "rate": rate, "cells": list(self.cells.values())}
        value = {**self.fields, **now}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps({**value, _CHECKSUM: _checksum(value)}), encoding="utf-8")

    def follow(self, specs: Sequence[RunSpec]) -> Callable[[Progress], None]:
        """A function for `on_progress` of the loop that trains these runs of the stack."""
        began: tuple[float, int] | None = None
        written = 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal began, written
            if progress.accuracies is not None:
                self._see(specs, progress.accuracies)
            now = time.monotonic()
            began = began or (now, progress.done)
            if now - written > WRITE_SECONDS:
                written = now
                start, first = began
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
            trained = np.delete(accuracies.outside[k], spec.test_envs)
            self._keep(spec, float(trained.mean()), float(accuracies.inside[k, spec.test_envs[0]]))

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
    """Progress of a sweep: finished and running runs, speed, and accuracies so far."""

    planned: int  # runs
    done: int
    running: int
    run_steps: int  # of all planned runs
    run_steps_done: int
    rate: float  # run-steps per second of all stacks that are being trained
    stacks: tuple[StackStatus, ...]
    standings: tuple[Standing, ...]

    @property
    def missing(self) -> int:
        """Runs that are neither done nor running."""
        return self.planned - self.done - self.running

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None if the rate is not known."""
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
    claimed: set[str] = set()
    if folder.stacks.is_dir():
        with turn(folder.stacks):
            claimed = set(claims(folder.stacks))
    found = map(_read_json, sorted(folder.stacks.glob("[!.]*.progress.json")))
    progress = [data for data in found if data is not None]
    stacks = tuple(
        StackStatus(**{each.name: data[each.name] for each in fields(StackStatus)})
        for data in progress
        if data["stack"] in claimed and data["state"] == "running"
    )
    done = [run for run in runs if run.id in finished]
    run_steps = sum(run.steps for run in runs)
    steps_done = sum(run.steps for run in done) + sum(stack.runs * stack.done for stack in stacks)
    return SweepStatus(
        planned=len(runs),
        done=len(done),
        running=min(sum(stack.runs for stack in stacks), len(runs) - len(done)),
        run_steps=run_steps,
        run_steps_done=min(steps_done, run_steps),
        rate=sum(stack.rate for stack in stacks),
        stacks=stacks,
        standings=_standings(progress),
    )


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


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a progress file; None if it does not exist, is damaged or cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.pop(_CHECKSUM, None) != _checksum(value):
        return None
    return value


def _checksum(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value).encode())
