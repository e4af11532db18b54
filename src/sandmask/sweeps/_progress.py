"""Progress of a stack, written to the sweep's folder."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from sandmask.records import RunRecord, RunSpec
from sandmask.selection import training_domain
from sandmask.sweeps._folder import SweepFolder, write_json
from sandmask.training import Accuracies, Progress

WRITE_SECONDS = 1.0


class StackProgress:
    """Follows a loop, and writes a small file about once a second; `stop` is asked as often.

    The best accuracies are those of training-domain selection, run by run: what a table would be made of now.
    """

    def __init__(
        self,
        folder: SweepFolder,
        stack: str,
        specs: Sequence[RunSpec],
        *,
        device: str,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self.stack, self.stop = folder, stack, stop
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
        self._began: tuple[float, int] | None = None
        self._written = 0.0

    def follow(self, specs: Sequence[RunSpec]) -> Callable[[Progress], None]:
        """What to give a loop that trains these runs of the stack as its `on_progress`."""

        def on_progress(progress: Progress) -> None:
            if progress.accuracies is not None:
                for spec, seen in zip(specs, _seen(specs, progress.accuracies), strict=True):
                    self._keep(spec, *seen)
            now = time.monotonic()
            if self._began is None:
                self._began = (now, progress.done)
            if now - self._written > WRITE_SECONDS:
                self._written = now
                began, first = self._began
                rate = (progress.done - first) * len(specs) / (now - began) if now > began else 0.0
                self.write("running", done=progress.done, rate=rate)
                if self.stop():
                    raise KeyboardInterrupt

        self._began = None
        return on_progress

    def finish(self, records: Sequence[RunRecord]) -> None:
        """Say what finished runs came to, which is final."""
        for record in records:
            if len(record.steps) and len(record.spec.test_envs) == 1:
                choice = training_domain(record)
                assert choice is not None
                held_out = record.accuracy_in[choice.index, record.spec.test_envs[0]]
                self.cells.pop(record.spec.id, None)
                self._keep(record.spec, choice.value[0], float(held_out))

    def start(self) -> None:
        """Write the first file. On a full or read-only disk this fails, before time is spent on training."""
        self._write("running", done=0, rate=0.0)

    def write(self, state: str, **more: Any) -> None:
        """Write the file now. It only informs: training goes on where it cannot be written."""
        with suppress(OSError):
            self._write(state, **more)

    def _write(self, state: str, **more: Any) -> None:
        cells = list(self.cells.values())
        write_json(
            self.folder.progress(self.stack),
            {**self.fields, "state": state, "updated": time.time(), **more, "cells": cells},
        )

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


def _seen(specs: Sequence[RunSpec], accuracies: Accuracies) -> list[tuple[float, float]]:
    """Of each run, the mean "out" accuracy over its training environments, and the accuracy on the held-out one."""
    found = []
    for k, spec in enumerate(specs):
        held_out = list(spec.test_envs)
        trained = np.delete(accuracies.outside[k], held_out)
        found.append((float(trained.mean()), float(accuracies.inside[k, held_out[0]])))
    return found
