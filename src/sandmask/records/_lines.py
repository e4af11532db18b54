"""The lines of a record file: one JSON object each, of kind "run", "eval" or "end", with a checksum.

The checksum, `"crc"`, is the last entry of a line. It is the CRC32 of the line without this entry, continued from the
checksum of the run's previous line, so that changed, missing and moved lines are all detected. Older files have no
checksums and are read without this check.
"""

import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sandmask.errors import SandmaskError
from sandmask.records._checks import check_accuracies, check_counts, check_integer, check_names, check_run
from sandmask.records._measures import table_size
from sandmask.records._types import SCHEMA_VERSION, RunSpec, Sizes, Status

_NON_FINITE = {"nan", "inf", "-inf"}  # written as strings, because JSON has no such numbers
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"\}\n\Z')
_CRC_LENGTH = len(',"crc":"00000000"}\n')
_KEYS = {
    "run": {"schema", "kind", "run", "spec", "env_names", "classes", "sizes"},
    "eval": {"kind", "run", "step", "in", "out", "metrics", "tables"},
    "end": {"kind", "run", "status", "step"},
}


def encoded(line: dict[str, Any], before: int) -> tuple[bytes, int]:
    """Encode a line and return its checksum too. `before` is that of the run's previous line, or 0 if there is none."""
    text = json.dumps(line, separators=(",", ":"), allow_nan=False).encode()
    crc = zlib.crc32(text, before)
    return text[:-1] + b',"crc":"%08x"}\n' % crc, crc


def _checksum(raw: bytes, before: int, *, required: bool) -> tuple[int, bool]:
    """Return the checksum of a line, and whether the line contains it. A wrong checksum raises `ValueError`.

    :param before: the checksum of the run's previous line.
    :param required: whether a missing checksum is an error, because an earlier line of the run has one.
    """
    stated = _CRC.search(raw, max(0, len(raw) - _CRC_LENGTH))
    if stated is None:
        if required:
            crlf = "; its line ending became CRLF, which an editor may have done" if raw.endswith(b"\r\n") else ""
            raise ValueError(f"its checksum is missing{crlf}")
        return zlib.crc32(raw[:-1], before), False
    crc = zlib.crc32(raw[:-_CRC_LENGTH] + b"}", before)
    if crc != int(stated[1], 16):
        raise ValueError(
            "its checksum does not match: this line was changed, or the previous line of the run is missing"
        )
    return crc, True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(raw: bytes) -> dict[str, Any]:
    """Decode the JSON object in a line. Anything else raises `ValueError`, also JSON that is nested too deeply."""
    try:
        line = _decoder.decode(raw.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"unknown kind {kind!r}")
    if not isinstance(line.get("run"), str):
        raise ValueError("it does not name a run")
    if "crc" not in line and line.keys() - _KEYS[kind]:
        raise ValueError(f"unknown entries: {', '.join(sorted(map(repr, line.keys() - _KEYS[kind])))}")
    return line


def run_line(
    spec: RunSpec, env_names: Sequence[str], classes: Sequence[str], sizes: Sizes | None = None
) -> dict[str, Any]:
    """Return the first line of a run: its complete spec, names of environments and classes, and sizes of splits."""
    line = {
        "schema": SCHEMA_VERSION,
        "kind": "run",
        "run": spec.id,
        "spec": spec.to_json(),
        "env_names": list(env_names),
        "classes": list(classes),
    }
    return line if sizes is None else {**line, "sizes": sizes}


def eval_line(
    run_id: str,
    step: int,
    accuracy_in: Sequence[float],
    accuracy_out: Sequence[float],
    metrics: Mapping[str, float],
    tables: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    """Return the line of an evaluation."""
    floats = {name: float(value) for name, value in metrics.items()}
    line: dict[str, Any] = {
        "kind": "eval",
        "run": run_id,
        "step": int(step),
        "in": [float(value) for value in accuracy_in],
        "out": [float(value) for value in accuracy_out],
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in floats.items()},
    }
    if tables:
        line["tables"] = {name: [int(count) for count in counts] for name, counts in tables.items()}
    return line


@dataclass
class RunState:
    """The state of a run after the lines read so far, against which its next line is checked."""

    environments: int
    classes: int
    sizes: Sizes | None
    last_step: int | None = None
    status: Status = "running"
    crc: int = 0
    has_crc: bool = False

    def check_accuracies(self, inside: Any, outside: Any) -> None:
        """Check the accuracies of an evaluation."""
        for values, sizes in zip((inside, outside), self.sizes or (None, None), strict=True):
            check_accuracies(values, self.environments, sizes)


def read_lines(path: Path, runs: dict[str, RunState]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record file, decoded and checked. A last line without a newline is left out.

    :param runs: receives the state of each run, by its id.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return  # the process was killed, or is still writing
            try:
                line = _take(raw, runs)
            except SandmaskError as error:
                raise SandmaskError(f"{path}:{number}: {error}") from error
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                _refuse(path, number, raw, error)
            yield line


def _take(raw: bytes, runs: dict[str, RunState]) -> dict[str, Any]:
    """Decode a line, check it against the state of its run, and update the state."""
    line = _decode(raw)
    kind, run_id = line["kind"], line["run"]
    if kind == "run":
        check_schema(line["schema"])
        if run_id in runs:
            raise ValueError(f"run {run_id} begins a second time")
        runs[run_id] = _begin(line)
    if run_id not in runs:
        raise ValueError(f"run {run_id!r} has no first line before it")
    run = runs[run_id]
    run.crc, run.has_crc = _checksum(raw, run.crc, required=run.has_crc or "crc" in line)
    if kind == "eval":
        _evaluate(run, line)
    elif kind == "end":
        _end(run, line)
    return line


def _begin(line: dict[str, Any]) -> RunState:
    env_names, classes = line["env_names"], line["classes"]
    if not isinstance(env_names, list) or not isinstance(classes, list):
        raise ValueError("env_names and classes should be lists")
    sizes = line.get("sizes")
    check_run(line["run"], RunSpec.from_json(line["spec"]), env_names, classes, sizes)
    line["sizes"] = None if sizes is None else (tuple(sizes[0]), tuple(sizes[1]))
    return RunState(len(env_names), len(classes), line["sizes"])


def _evaluate(run: RunState, line: dict[str, Any]) -> None:
    run_id, step = line["run"], line["step"]
    check_integer("step", step)
    if run.status != "running":
        raise ValueError(f"step {step} follows the end of run {run_id}")
    if run.last_step is not None and step <= run.last_step:
        raise ValueError(f"step {step} of run {run_id} follows its step {run.last_step}")
    run.check_accuracies(line["in"], line["out"])
    check_names("metric", line["metrics"])
    line["metrics"] = {sys.intern(name): metric_value(value) for name, value in line["metrics"].items()}
    for name, counts in line.setdefault("tables", {}).items():
        check_counts(name, counts, table_size(name, run.environments, run.classes))
    run.last_step = step


def _end(run: RunState, line: dict[str, Any]) -> None:
    if run.status != "running":
        raise ValueError(f"run {line['run']} ends a second time")
    if line["status"] not in ("done", "diverged", "pruned"):
        raise ValueError(f"status {line['status']!r} is not one of 'done', 'diverged' and 'pruned'")
    check_integer("step", line["step"])
    run.status = line["status"]


def _refuse(path: Path, number: int, raw: bytes, error: Exception) -> NoReturn:
    if number == 1 and b'"env0_in_acc"' in raw:
        raise SandmaskError(
            f"{path} is a DomainBed results file. Import the sweep with "
            "`sandmask import-domainbed DIR --out STORE`, then read STORE."
        ) from error
    said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    raise SandmaskError(
        f"{path}:{number} is not a line of a record file ({said}). "
        "The file is damaged there: restore it from a copy, or remove the run that this line belongs to and train it "
        "again."
    ) from error


def metric_value(value: Any) -> float:
    """Return the number of a metric. NaN and infinities are written as strings."""
    if isinstance(value, str) and value in _NON_FINITE:
        return float(value)
    if type(value) not in (float, int):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def check_schema(version: Any) -> None:
    """Raise an error for records of a newer sandmask, which would be misread."""
    if type(version) is not int or version < 1:
        raise SandmaskError(f"schema version {version!r} is not a version number.")
    if version > SCHEMA_VERSION:
        raise SandmaskError(
            f"it was written by a newer sandmask (schema {version}, this one reads up to {SCHEMA_VERSION}). "
            "Upgrade sandmask to read it."
        )
