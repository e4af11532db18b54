"""Reading one record file: lines to runs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.records._lines import check_schema, metric_value
from sandmask.records._types import RunRecord, RunSpec, Status


@dataclass
class _Growing:
    """A run while its lines are read."""

    spec: RunSpec
    env_names: tuple[str, ...]
    classes: tuple[str, ...]
    steps: list[int] = field(default_factory=list)
    accuracy_in: list[list[float]] = field(default_factory=list)
    accuracy_out: list[list[float]] = field(default_factory=list)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    status: Status = "running"
    diverged_at: int | None = None

    def add(self, line: dict[str, Any]) -> None:
        step, count = line["step"], len(self.env_names)
        if self.status != "running":
            raise ValueError(f"step {step} follows the end of run {self.spec.id}")
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step {step} of run {self.spec.id} follows its step {self.steps[-1]}")
        if len(line["in"]) != count or len(line["out"]) != count:
            raise ValueError(f"accuracies of {len(line['in'])} environments where {count} are named")
        for name, value in line["metrics"].items():
            self.metrics.setdefault(name, {})[len(self.steps)] = metric_value(value)
        self.steps.append(step)
        self.accuracy_in.append(line["in"])
        self.accuracy_out.append(line["out"])

    def end(self, line: dict[str, Any]) -> None:
        if line["status"] not in ("done", "diverged"):
            raise ValueError(f"status {line['status']!r} is neither 'done' nor 'diverged'")
        self.status = line["status"]
        self.diverged_at = line["step"] if self.status == "diverged" else None

    def freeze(self) -> RunRecord:
        shape = (len(self.steps), len(self.env_names))
        metrics = {}
        for name, values in self.metrics.items():
            metrics[name] = np.full(len(self.steps), np.nan)
            metrics[name][list(values)] = list(values.values())
        return RunRecord(
            spec=self.spec,
            env_names=self.env_names,
            steps=np.array(self.steps, dtype=np.int64),
            accuracy_in=np.array(self.accuracy_in, dtype=np.float64).reshape(shape),
            accuracy_out=np.array(self.accuracy_out, dtype=np.float64).reshape(shape),
            metrics=metrics,
            status=self.status,
            diverged_at=self.diverged_at,
            classes=self.classes,
        )


def read_file(path: Path) -> list[RunRecord]:
    """The runs of one record file, in the order they began. A last line without its newline is not read."""
    runs: dict[str, _Growing] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break  # torn by a kill, or still being written
            try:
                _take(json.loads(raw), runs)
            except SandmaskError as error:
                raise SandmaskError(f"{path}:{number}: {error}") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                _refuse(path, number, raw, error)
    return [run.freeze() for run in runs.values()]


def _take(line: dict[str, Any], runs: dict[str, _Growing]) -> None:
    kind = line["kind"]
    if kind == "eval":
        runs[line["run"]].add(line)
    elif kind == "run":
        check_schema(line["schema"])
        if line["run"] in runs:
            raise ValueError(f"run {line['run']} begins a second time")
        spec = RunSpec.from_json(line["spec"])
        runs[line["run"]] = _Growing(spec, tuple(line["env_names"]), tuple(line["classes"]))
    elif kind == "end":
        runs[line["run"]].end(line)
    else:
        raise ValueError(f"unknown kind {kind!r}")


def _refuse(path: Path, number: int, raw: bytes, error: Exception) -> NoReturn:
    if number == 1 and b'"env0_in_acc"' in raw:
        raise SandmaskError(
            f"{path} is a DomainBed results file. Bring the sweep in with "
            "`sandmask import-domainbed DIR --out STORE`, then read STORE."
        ) from error
    raise SandmaskError(
        f"{path}:{number} is not a line of a record file ({type(error).__name__}: {error}). "
        "The file is damaged there: restore it, or remove that line and what depends on it."
    ) from error
