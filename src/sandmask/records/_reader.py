"""Reading records: a folder of record files and archives, one file, one line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sandmask.errors import SandmaskError
from sandmask.records._archive import ARCHIVE_SUFFIX, read_archive
from sandmask.records._lines import (
    check_accuracies,
    check_counts,
    check_integer,
    check_names,
    check_run,
    check_schema,
    checksum,
    decode,
    metric_value,
)
from sandmask.records._measures import table_size
from sandmask.records._types import RunRecord, RunSpec, Status


def read_runs(path: str | os.PathLike[str], *more: str | os.PathLike[str]) -> list[RunRecord]:
    """Read the runs in record files, archives, or anywhere below folders.

    A run that is in two files counts once, as the longer of the two; contradicting records are an error. Runs that are
    still being written are read as far as they have come, with status "running".

    :param path: folder, record file or archive.
    :param more: further ones.
    :return: runs in the order of the files' paths.
    """
    runs: dict[str, tuple[RunRecord, Path]] = {}
    for file in (file for each in (path, *more) for file in _files(each)):
        for run in _read(file):
            known = runs.get(run.spec.id)
            runs[run.spec.id] = (run, file) if known is None else _merge(known, (run, file))
    return [run for run, _ in runs.values()]


def iterate_runs(path: str | os.PathLike[str]) -> Iterator[RunRecord]:
    """The same runs, one file in memory at a time; a run that is in two files comes twice."""
    for file in _files(path):
        yield from _read(file)


def _files(path: str | os.PathLike[str]) -> list[Path]:
    root = Path(path)
    if not root.exists():
        raise SandmaskError(f"{root} does not exist. Name a folder of records, a .jsonl file or an archive.")
    if not root.is_dir():
        return [root]
    found = sorted([*root.rglob("*.jsonl"), *root.rglob(f"*{ARCHIVE_SUFFIX}")])
    # Folders and pipes of such a name hold no records. A broken link should: opening it says so.
    return [file for file in found if file.is_file() or not file.exists()]


def refuse_record_name(target: Path) -> None:
    """Raise an error if a file that is about to be written is named like one of records: it would replace that."""
    if target.name.endswith((".jsonl", ARCHIVE_SUFFIX)):
        raise SandmaskError(f"{target} is named like a file of records, which this would replace. Name another file.")


def _read(file: Path) -> list[RunRecord]:
    if file.suffix == ".parquet":
        return read_archive(file)
    return read_file(file)


def _merge(first: tuple[RunRecord, Path], second: tuple[RunRecord, Path]) -> tuple[RunRecord, Path]:
    shorter, longer = sorted((first, second), key=lambda item: (len(item[0].steps), item[0].status != "running"))
    if not _begins(shorter[0], longer[0]):
        spec = longer[0].spec
        raise SandmaskError(
            f"Run {spec.id} ({spec.dataset}, {spec.algorithm}) has different records in {first[1]} and "
            f"{second[1]}. Equal specs give equal records, so one of them is wrong: remove it."
        )
    run, other = longer[0], shorter[0]
    if len(run.steps) > len(other.steps):
        return longer
    # What one of them recorded beyond the other, such as metrics that were asked for later, is true of both.
    return replace(run, metrics=other.metrics | run.metrics, tables=other.tables | run.tables), longer[1]


def _begins(shorter: RunRecord, longer: RunRecord) -> bool:
    """Whether the shorter record is the longer one, or what it was at an earlier time."""
    count = len(shorter.steps)
    if shorter.env_names != longer.env_names:
        return False
    if shorter.status != "running" and (shorter.status, shorter.diverged_at, count) != (
        longer.status,
        longer.diverged_at,
        len(longer.steps),
    ):
        return False
    same = (
        np.array_equal(shorter.steps, longer.steps[:count])
        and np.array_equal(shorter.accuracy_in, longer.accuracy_in[:count])
        and np.array_equal(shorter.accuracy_out, longer.accuracy_out[:count])
    )
    # Metrics may hold a wall-clock time, which two honest runs do not share.
    return bool(same)


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
    tables: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    status: Status = "running"
    diverged_at: int | None = None
    crc: int = 0
    has_crc: bool = False

    def add(self, line: dict[str, Any]) -> None:
        step, count = line["step"], len(self.env_names)
        check_integer("step", step)
        if self.status != "running":
            raise ValueError(f"step {step} follows the end of run {self.spec.id}")
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step {step} of run {self.spec.id} follows its step {self.steps[-1]}")
        check_accuracies(line["in"], count)
        check_accuracies(line["out"], count)
        for name, value in line["metrics"].items():
            if name not in self.metrics:
                check_names("metric", [name])
            self.metrics.setdefault(name, {})[len(self.steps)] = metric_value(value)
        self._add_tables(line.get("tables", {}))
        self.steps.append(step)
        self.accuracy_in.append(line["in"])
        self.accuracy_out.append(line["out"])

    def _add_tables(self, tables: dict[str, Any]) -> None:
        for name, counts in tables.items():
            check_counts(name, counts, table_size(name, len(self.env_names), len(self.classes)))
            self.tables.setdefault(name, {})[len(self.steps)] = counts

    def end(self, line: dict[str, Any]) -> None:
        if self.status != "running":
            raise ValueError(f"run {self.spec.id} ends a second time")
        if line["status"] not in ("done", "diverged", "pruned"):
            raise ValueError(f"status {line['status']!r} is not one of 'done', 'diverged' and 'pruned'")
        check_integer("step", line["step"])
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
            tables={name: _filled(rows, len(self.steps)) for name, rows in self.tables.items()},
        )


def _filled(rows: dict[int, list[int]], count: int) -> NDArray[np.int64]:
    """A table with zeros at the evaluations that have no counts."""
    table = np.zeros((count, len(next(iter(rows.values())))), dtype=np.int64)
    table[list(rows)] = list(rows.values())
    return table


def read_file(path: Path) -> list[RunRecord]:
    """The runs of one record file, in the order they began. A last line without its newline is not read."""
    runs: dict[str, _Growing] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break  # torn by a kill, or still being written
            try:
                _take(raw, runs)
            except SandmaskError as error:
                raise SandmaskError(f"{path}:{number}: {error}") from error
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                _refuse(path, number, raw, error)
    return [run.freeze() for run in runs.values()]


def _take(raw: bytes, runs: dict[str, _Growing]) -> None:
    line = decode(raw)
    kind, run_id = line["kind"], line["run"]
    if kind == "run":
        check_schema(line["schema"])
        if run_id in runs:
            raise ValueError(f"run {run_id} begins a second time")
        run = _begin(line)
        run.crc, run.has_crc = checksum(raw, 0, required="crc" in line)
        runs[run_id] = run
        return
    if run_id not in runs:
        raise ValueError(f"no line before it begins a run {run_id!r}")
    run = runs[run_id]
    run.crc, run.has_crc = checksum(raw, run.crc, required=run.has_crc or "crc" in line)
    if kind == "eval":
        run.add(line)
    else:
        run.end(line)


def _begin(line: dict[str, Any]) -> _Growing:
    spec = RunSpec.from_json(line["spec"])
    env_names, classes = line["env_names"], line["classes"]
    if not isinstance(env_names, list) or not isinstance(classes, list):
        raise ValueError("env_names and classes should be lists")
    check_run(line["run"], spec, env_names, classes)
    return _Growing(spec, tuple(env_names), tuple(classes))


def _refuse(path: Path, number: int, raw: bytes, error: Exception) -> NoReturn:
    if number == 1 and b'"env0_in_acc"' in raw:
        raise SandmaskError(
            f"{path} is a DomainBed results file. Bring the sweep in with "
            "`sandmask import-domainbed DIR --out STORE`, then read STORE."
        ) from error
    said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    raise SandmaskError(
        f"{path}:{number} is not a line of a record file ({said}). "
        "The file is damaged there: restore it from a copy, or remove the run that this line belongs to and train it "
        "again."
    ) from error
