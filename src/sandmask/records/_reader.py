"""Reading records: folders, record files and archives."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandmask._files import files_below
from sandmask.errors import SandmaskError
from sandmask.records._archive import ARCHIVE_SUFFIX, read_archive
from sandmask.records._lines import read_lines
from sandmask.records._types import RunRecord, RunSpec, Status, extent, joined


def read_runs(path: str | os.PathLike[str], *more: str | os.PathLike[str]) -> list[RunRecord]:
    """Read runs from record files, archives, and folders that contain such files at any depth.

    A run that is in several files is returned once, with its longest record. Contradictory records raise an error. Runs
    that are still being written are read up to their last complete line, with status "running".

    :param path: folder, record file or archive.
    :param more: further folders, record files or archives.
    :return: runs in the order of the files' paths.
    """
    runs: dict[str, tuple[RunRecord, Path]] = {}
    for file in (file for each in (path, *more) for file in _files(each)):
        for run in _read(file):
            known = runs.get(run.spec.id)
            runs[run.spec.id] = (run, file) if known is None else _merge(known, (run, file))
    return [run for run, _ in runs.values()]


def _files(path: str | os.PathLike[str]) -> list[Path]:
    root = Path(path)
    if not root.exists():
        raise SandmaskError(f"{root} does not exist. Name a folder of records, a .jsonl file or an archive.")
    if not root.is_dir():
        return [root]
    found = files_below(root, ".jsonl", ARCHIVE_SUFFIX)
    # Pipes of such a name are skipped. A broken link is not: opening it raises an error.
    return [file for file in found if file.is_file() or not file.exists()]


def refuse_record_name(target: Path) -> None:
    """Raise an error if a file to be written has the name of a record file, which it could replace."""
    if target.name.endswith((".jsonl", ARCHIVE_SUFFIX)):
        raise SandmaskError(f"{target} is named like a file of records and could overwrite one. Choose another name.")


def _merge(first: tuple[RunRecord, Path], second: tuple[RunRecord, Path]) -> tuple[RunRecord, Path]:
    shorter, longer = sorted((first, second), key=lambda item: extent(item[0]))
    if not _begins(shorter[0], longer[0]):
        spec = longer[0].spec
        raise SandmaskError(
            f"Run {spec.id} ({spec.dataset}, {spec.algorithm}) was trained twice with different results, in {first[1]} "
            f"and {second[1]}. Only the same stacks on the same kind of machine give equal results. Report the files "
            "separately, or delete one of them."
        )
    return joined(shorter[0], longer[0]), longer[1]


def _begins(shorter: RunRecord, longer: RunRecord) -> bool:
    """Whether the shorter record equals the longer one or its beginning."""
    count = len(shorter.steps)
    ended_alike = (shorter.status, shorter.diverged_at) == (longer.status, longer.diverged_at)
    comparable = _comparable(shorter, longer)
    # Metrics are not compared: they may contain wall-clock times.
    return (
        shorter.env_names == longer.env_names
        and (shorter.status == "running" or (ended_alike and count == len(longer.steps)))
        and np.array_equal(shorter.steps, longer.steps[:count])
        and np.array_equal(shorter.accuracy_in[:, comparable], longer.accuracy_in[:count, comparable])
        and np.array_equal(shorter.accuracy_out, longer.accuracy_out[:count])
    )


def _comparable(one: RunRecord, other: RunRecord) -> NDArray[np.bool_]:
    """The environments whose "in" accuracies must agree.

    With `train_eval_limit`, which is not in the spec, those of training environments are computed on fewer examples.
    """
    if one.sizes is None or other.sizes is None or one.sizes[1] != other.sizes[1]:
        return np.ones(len(one.env_names), dtype=np.bool_)
    comparable: NDArray[np.bool_] = np.array(one.sizes[0]) == np.array(other.sizes[0])
    comparable[list(one.spec.test_envs)] = True
    return comparable


def _read(file: Path) -> list[RunRecord]:
    """Read the runs of an archive, or of a record file in the order in which they began."""
    if file.suffix == ".parquet":
        return read_archive(file)
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(file, {}):
        lines.setdefault(line["run"], []).append(line)
    return [_record(of_run) for of_run in lines.values()]


def _record(lines: list[dict[str, Any]]) -> RunRecord:
    """Make the record of a run from its lines."""
    first, last = lines[0], lines[-1]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    shape = (len(evaluations), len(first["env_names"]))
    metrics = dict.fromkeys(name for line in evaluations for name in line["metrics"])
    tables = {name: len(counts) for line in evaluations for name, counts in line["tables"].items()}
    status: Status = last["status"] if last["kind"] == "end" else "running"
    return RunRecord(
        spec=RunSpec.from_json(first["spec"]),
        env_names=tuple(first["env_names"]),
        steps=np.array([line["step"] for line in evaluations], dtype=np.int64),
        accuracy_in=np.array([line["in"] for line in evaluations], dtype=np.float64).reshape(shape),
        accuracy_out=np.array([line["out"] for line in evaluations], dtype=np.float64).reshape(shape),
        metrics={name: np.array([line["metrics"].get(name, np.nan) for line in evaluations]) for name in metrics},
        status=status,
        diverged_at=last["step"] if status == "diverged" else None,
        classes=tuple(first["classes"]),
        sizes=first["sizes"],
        tables={  # with zeros at the evaluations that have no counts
            name: np.array([line["tables"].get(name, [0] * size) for line in evaluations], dtype=np.int64)
            for name, size in tables.items()
        },
    )
