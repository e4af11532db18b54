"""Progress files of stacks, which workers write and any process can read."""

import json
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from sandmask._files import replacing
from sandmask.records import RunRecord, RunSpec
from sandmask.selection import training_domain
from sandmask.sweeps._folder import SweepFolder
from sandmask.training import Accuracies, Progress
from sandmask.training.keeping import training_mean

WRITE_SECONDS = 1.0
WARM_UPS = 4  # reports of a loop before its rate is measured: the first steps and evaluations compile kernels
MARGIN = 1.1  # of the time that a stack is expected to take
_CHECKSUM = "crc32"


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
class Best:
    """The checkpoint of a run that training-domain selection would choose now."""

    env: int  # the held-out environment
    trial: int
    draw: int
    value: float  # mean "out" accuracy over the training environments
    held_out: float  # "in" accuracy on the held-out environment


@dataclass(frozen=True)
class StackProgress(StackStatus):
    """The content of a progress file."""

    state: str = "running"  # or that of the job's outcome
    pid: int = 0
    session: str = ""  # see `JobOptions`
    work: float = 0.0  # of the stack, see `Job`
    seconds: float = 0.0  # since the job began
    cells: tuple[Best, ...] = ()  # for each run that has been evaluated

    @property
    def status(self) -> StackStatus:
        """The part that `SweepStatus` shows."""
        return StackStatus(**{each.name: getattr(self, each.name) for each in fields(StackStatus)})


class _Rate:
    """Measures the run-steps per second of a loop, after its first reports."""

    def __init__(self, runs: int) -> None:
        self._runs, self._reports = runs, 0

    def after(self, done: int) -> float:
        """Return the rate after `done` steps; 0 until it is measured."""
        now = time.monotonic()
        self._reports += 1
        if self._reports <= WARM_UPS:
            self._start, self._first = now, done
        return (done - self._first) * self._runs / (now - self._start) if now > self._start else 0.0


class ProgressWriter:
    """Writes the progress file of a stack about once a second, and calls `stop` as often."""

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
        self.path, self.stop = folder.progress(stack), stop
        self._began, self._written = time.monotonic(), -math.inf
        self._best: dict[str, Best] = {}  # by the id of the run
        self._progress = StackProgress(
            stack=stack,
            dataset=specs[0].dataset,
            algorithm=specs[0].algorithm,
            runs=len(specs),
            done=0,
            steps=specs[0].steps,
            rate=0.0,
            device=device,
            host=socket.gethostname(),
            updated=0.0,
            pid=os.getpid(),
            session=session,
            work=work,
        )

    def write(self, state: str, *, done: int, rate: float = 0.0) -> None:
        """Write the file now."""
        seconds = time.monotonic() - self._began
        now = replace(self._progress, state=state, done=done, rate=rate, updated=time.time(), seconds=seconds)
        write_json(self.path, {**vars(now), "cells": [vars(best) for best in self._best.values()]})

    def follow(self, specs: Sequence[RunSpec]) -> Callable[[Progress], None]:
        """Return the function to pass as `on_progress` to the loop that trains these runs of the stack."""
        self._progress, self._written = replace(self._progress, runs=len(specs)), -math.inf
        return partial(self._on_progress, specs, _Rate(len(specs)))

    def _on_progress(self, specs: Sequence[RunSpec], measured: _Rate, progress: Progress) -> None:
        if progress.accuracies is not None:
            self._see(specs, progress.accuracies)
        rate, now = measured.after(progress.done), time.monotonic()
        if now - self._written > WRITE_SECONDS:
            self._written = now
            with suppress(OSError):  # training does not need this file
                self.write("running", done=progress.done, rate=rate)
            if self.stop():
                raise KeyboardInterrupt

    def _see(self, specs: Sequence[RunSpec], accuracies: Accuracies) -> None:
        """Keep the accuracies of an evaluation, for each run that it is the best one of so far."""
        for k, spec in enumerate(specs):
            held_out = float(accuracies.inside[k, spec.test_envs[0]])
            self._keep(spec, training_mean(accuracies.outside[k], spec), held_out)

    def finish(self, records: Sequence[RunRecord]) -> None:
        """Replace the accuracies of finished runs by the final ones."""
        for record in records:
            if len(record.steps) and len(record.spec.test_envs) == 1:
                choice = training_domain(record)
                assert choice is not None
                held_out = record.accuracy_in[choice.index, record.spec.test_envs[0]]
                self._best.pop(record.spec.id, None)
                self._keep(record.spec, choice.value[0], float(held_out))

    def _keep(self, spec: RunSpec, value: float, held_out: float) -> None:
        known = self._best.get(spec.id)
        if len(spec.test_envs) == 1 and math.isfinite(value) and (known is None or value > known.value):
            self._best[spec.id] = Best(spec.test_envs[0], spec.trial_seed, spec.hparams_seed, value, held_out)


def expected_seconds(folder: SweepFolder, session: str, spec: RunSpec, work: float) -> float | None:
    """The time that a stack may take, by those of the same call that are done; None while there are none.

    Stacks of the same dataset and algorithm count, and the others while there are none of these.

    :param folder: the sweep's folder.
    :param session: the call's session: see `JobOptions`.
    :param spec: spec of a run of the stack.
    :param work: the work of the stack, in the unit of the others'.
    """
    done = [each for each in read_progress(folder) if each.state == "done" and each.session == session]
    like = [each for each in done if (each.dataset, each.algorithm) == (spec.dataset, spec.algorithm)]
    timed = [each for each in like or done if each.work > 0]
    return MARGIN * work * sum(each.seconds for each in timed) / sum(each.work for each in timed) if timed else None


def read_progress(folder: SweepFolder) -> list[StackProgress]:
    """The progress files of a sweep. Damaged ones are left out."""
    known = {each.name for each in fields(StackProgress)}
    found = []
    for data in map(read_json, sorted(folder.stacks.glob("[!.]*.progress.json"))):
        if data is not None:
            data["cells"] = tuple(Best(**cell) for cell in data["cells"])
            found.append(StackProgress(**{name: value for name, value in data.items() if name in known}))
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write values with a checksum."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**value, _CHECKSUM: _checksum(value)}), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file of `write_json`; None if it does not exist, is damaged or cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.pop(_CHECKSUM, None) != _checksum(value):
        return None
    return value


def _checksum(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value).encode())
