"""The lines of a record file: one JSON object each, of kind "run", "eval" or "end", with a checksum.

The checksum, `"crc"`, is the last entry of a line. It is the CRC32 of the line's bytes without it, continued from the
checksum of the same run's line before: so a changed, a missing and a moved line are all noticed. Files written before
there were checksums are read as they are.
"""

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, get_args

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.records._measures import table_size
from sandmask.records._types import SCHEMA_VERSION, RunRecord, RunSpec, Status

# JSON has no word for these, and a file that other tools can read is worth three strings.
_NON_FINITE = {"nan", "inf", "-inf"}
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"\}\n\Z')
_CRC_LENGTH = len(',"crc":"00000000"}\n')
_KEYS = {
    "run": {"schema", "kind", "run", "spec", "env_names", "classes"},
    "eval": {"kind", "run", "step", "in", "out", "metrics", "tables"},
    "end": {"kind", "run", "status", "step"},
}


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def with_checksum(line: bytes, before: int) -> tuple[bytes, int]:
    """A line with its checksum, and that checksum; `before` is that of the run's last line, or 0 for its first."""
    crc = zlib.crc32(line[:-1], before)
    return line[:-2] + b',"crc":"%08x"}\n' % crc, crc


def checksum(raw: bytes, before: int, *, required: bool) -> tuple[int, bool]:
    """The checksum of a line as read, and whether the line states it; a wrong one is a `ValueError`.

    :param before: the checksum of the line before, of the same run.
    :param required: whether a line that states none is damaged, because the run's line before has one.
    """
    stated = _CRC.search(raw, max(0, len(raw) - _CRC_LENGTH))
    if stated is None:
        if required:
            crlf = "; its line ending became CRLF, which an editor may have done" if raw.endswith(b"\r\n") else ""
            raise ValueError(f"its checksum is missing{crlf}")
        return zlib.crc32(raw[:-1], before), False
    crc = zlib.crc32(raw[:-_CRC_LENGTH] + b"}", before)
    if crc != int(stated[1], 16):
        raise ValueError("its checksum does not fit: this line was changed, or the run's line before it is missing")
    return crc, True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def decode(raw: bytes) -> dict[str, Any]:
    """The object of a line; a `ValueError` for anything else, also for JSON too deep to read."""
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
        raise ValueError("it names no run")
    if "crc" not in line and line.keys() - _KEYS[kind]:
        raise ValueError(f"unknown entries: {', '.join(sorted(map(repr, line.keys() - _KEYS[kind])))}")
    return line


def run_line(spec: RunSpec, env_names: Sequence[str], classes: Sequence[str]) -> bytes:
    """The line that opens a run: its complete spec and the names that its numbers go by."""
    return _encode(
        {
            "schema": SCHEMA_VERSION,
            "kind": "run",
            "run": spec.id,
            "spec": spec.to_json(),
            "env_names": list(env_names),
            "classes": list(classes),
        }
    )


def eval_line(
    run_id: str,
    step: int,
    accuracy_in: Sequence[float],
    accuracy_out: Sequence[float],
    metrics: Mapping[str, float],
    tables: Mapping[str, Sequence[int]] | None = None,
) -> bytes:
    """One checkpoint's evaluation. Floats have as many digits as it takes to read them back exactly."""
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
    return _encode(line)


def end_line(run_id: str, status: Status, step: int) -> bytes:
    """The line that closes a run."""
    return _encode({"kind": "end", "run": run_id, "status": status, "step": step})


def metric_value(value: Any) -> float:
    """A metric as it was before it was written."""
    if isinstance(value, str) and value in _NON_FINITE:
        return float(value)
    if type(value) not in (float, int):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def check_schema(version: Any) -> None:
    """Refuse what a newer sandmask wrote, rather than misread it."""
    if type(version) is not int or version < 1:
        raise SandmaskError(f"schema version {version!r} is not a version number.")
    if version > SCHEMA_VERSION:
        raise SandmaskError(
            f"written by a newer sandmask (schema {version}, this one reads up to {SCHEMA_VERSION}). "
            "Upgrade sandmask to read it."
        )


# Checks of records, shared by readers and the writer. They raise `ValueError`.

LONGEST_NAME = 1000  # characters; a longer name is damage, and would take every table with it
LARGEST_INTEGER = 2**63 - 1
_WORDS = ("dataset", "algorithm", "space", "network", "weights", "precision")
_COUNTS = ("steps", "checkpoint_every")
_SEEDS = ("hparams_seed", "trial_seed", "seed")


def check_run(run_id: str, spec: RunSpec, env_names: Sequence[Any], classes: Sequence[Any]) -> None:
    """Check everything that a run says about itself before its first evaluation."""
    check_spec(spec)
    if run_id != spec.id:
        raise ValueError(f"the id {run_id!r} does not belong to the spec, whose id is {spec.id!r}")
    check_names("environment", env_names)
    check_names("class", classes)
    if len(set(env_names)) != len(env_names):
        raise ValueError(f"two environments have the same name: {list(env_names)}")
    if not env_names:
        raise ValueError("no environment is named")
    outside = [env for env in spec.test_envs if env >= len(env_names)]
    if outside:
        raise ValueError(f"environment {outside[0]} is held out where {len(env_names)} are named")


def check_spec(spec: RunSpec) -> None:
    """Check the types and ranges of a spec's fields: a dataclass takes anything."""
    check_names("setting", [getattr(spec, name) for name in _WORDS])
    for name in _COUNTS + _SEEDS:
        check_integer(name, getattr(spec, name), least=1 if name in _COUNTS else None)
    for env in spec.test_envs:
        check_integer("test_envs", env)
    if len(set(spec.test_envs)) != len(spec.test_envs):
        raise ValueError(f"test_envs {list(spec.test_envs)} name an environment twice")
    if not isinstance(spec.hparams, dict) or not isinstance(spec.options, dict):
        raise ValueError("hparams and options should be objects")
    check_values("hparams", spec.hparams)
    check_values("options", spec.options)


def check_integer(name: str, value: Any, *, least: int | None = 0) -> None:
    """Check that a value is an integer that fits 64 bits and is at least `least`."""
    if type(value) is not int or abs(value) > LARGEST_INTEGER or (least is not None and value < least):
        raise ValueError(
            f"{name} should be an integer{'' if least is None else f' of at least {least}'}, not {value!r}"
        )


def check_names(kind: str, names: Iterable[Any]) -> None:
    """Check that names are words of a reasonable length that can be written down."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"the {kind} name {name!r} is not a string")
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"the {kind} name {name[:20]!r}... has {len(name):,} characters, and at most {LONGEST_NAME:,} are read"
            )
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"the {kind} name {name!r} is not valid Unicode")


def check_values(kind: str, value: Any) -> None:
    """Check JSON values of any depth: names as above, and finite numbers."""
    if isinstance(value, dict):
        check_names(kind, value)
        for one in value.values():
            check_values(kind, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            check_values(kind, one)
    elif isinstance(value, str):
        check_names(kind, [value])
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{kind} hold {value}, which is not a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{kind} hold an integer of more than 64 bits")


def check_accuracies(values: Any, environments: int) -> None:
    """Check one accuracy in 0..1 for each environment."""
    if not isinstance(values, list) or len(values) != environments:
        found = len(values) if isinstance(values, list) else repr(values)
        raise ValueError(f"accuracies of {found} environments where {environments} are named")
    for value in values:
        if type(value) not in (float, int) or not 0 <= value <= 1:
            raise ValueError(f"accuracies should be numbers from 0 to 1, not {value!r}")


def check_counts(name: str, values: Any, length: int) -> None:
    """Check a table as a line has it: a list of so many counts."""
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"the table {name!r} should be a list of {length} counts")
    for value in values:
        check_integer("a count", value)


def _check_tables(run: RunRecord) -> None:
    for name, table in run.tables.items():
        size = table_size(name, len(run.env_names), len(run.classes))
        if table.shape != (len(run.steps), size) or (table.size and table.min() < 0):
            raise ValueError(f"its table {name!r} should have {size} counts at each of {len(run.steps)} steps")


def check_record(run: RunRecord) -> None:
    """Check a whole run at once: its spec and names, its steps, and every accuracy."""
    try:
        check_run(run.spec.id, run.spec, run.env_names, run.classes)
        check_names("metric", run.metrics)
        shape = (len(run.steps), len(run.env_names))
        if run.accuracy_in.shape != shape or run.accuracy_out.shape != shape:
            raise ValueError(f"its accuracies do not have the shape of {shape[0]} steps and {shape[1]} environments")
        if any(curve.shape != shape[:1] for curve in run.metrics.values()):
            raise ValueError(f"it has {shape[0]} steps, but a metric has another number of values")
        _check_tables(run)
        if len(run.steps) and (run.steps[0] < 0 or (np.diff(run.steps) <= 0).any()):
            raise ValueError("its steps do not increase")
        if run.status not in get_args(Status):
            raise ValueError(f"its status {run.status!r} is not one of {', '.join(get_args(Status))}")
        for table in (run.accuracy_in, run.accuracy_out):
            if table.size and not (table.min() >= 0 and table.max() <= 1):  # NaN compares with nothing
                raise ValueError("its accuracies should be numbers from 0 to 1")
    except ValueError as error:
        raise ValueError(f"run {run.spec.id}: {error}") from error
