"""The lines of a record file: one JSON object each, of kind "run", "eval" or "end"."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sandmask.errors import SandmaskError
from sandmask.records._types import SCHEMA_VERSION, RunSpec, Status

# JSON has no word for these, and a file that other tools can read is worth three strings.
_NON_FINITE = {"nan", "inf", "-inf"}


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"


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
) -> bytes:
    """One checkpoint's evaluation. Floats have as many digits as it takes to read them back exactly."""
    plain = {name: value if math.isfinite(value) else str(value) for name, value in _floats(metrics)}
    return _encode(
        {
            "kind": "eval",
            "run": run_id,
            "step": int(step),
            "in": [float(value) for value in accuracy_in],
            "out": [float(value) for value in accuracy_out],
            "metrics": plain,
        }
    )


def _floats(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in metrics.items()]


def end_line(run_id: str, status: Status, step: int) -> bytes:
    """The line that closes a run."""
    return _encode({"kind": "end", "run": run_id, "status": status, "step": step})


def metric_value(value: Any) -> float:
    """A metric as it was before it was written."""
    if isinstance(value, str) and value not in _NON_FINITE:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def check_schema(version: Any) -> None:
    """Refuse what a newer sandmask wrote, rather than misread it."""
    if not isinstance(version, int) or version < 1:
        raise SandmaskError(f"schema version {version!r} is no version.")
    if version > SCHEMA_VERSION:
        raise SandmaskError(
            f"written by a newer sandmask (schema {version}, this one reads up to {SCHEMA_VERSION}). "
            "Upgrade sandmask to read it."
        )
