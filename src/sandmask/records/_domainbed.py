"""Read DomainBed's results as records. Each run has a folder with `results.jsonl` and, once finished, `done`."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.records._checks import check_record
from sandmask.records._types import RunRecord, RunSpec, held_out_environments

_ACCURACY = re.compile(r"env\d+_(in|out)_acc")
_NOT_METRICS = {"args", "hparams", "step"}
# Further arguments that determine a run, with DomainBed's defaults.
_ASSUMED = {
    "task": "domain_generalization",
    "holdout_fraction": 0.2,
    "uda_holdout_fraction": 0,
    "hparams": None,
}


@dataclass(frozen=True)
class Imported:
    """The runs that were read, and the folders that were skipped, each with the reason."""

    runs: tuple[RunRecord, ...]
    skipped: tuple[tuple[Path, str], ...]


def read_domainbed(path: str | os.PathLike[str], *, include_incomplete: bool = False) -> Imported:
    """Read a DomainBed sweep: every folder directly below `path` that has a `results.jsonl`.

    If DomainBed restarted a run and wrote its steps twice, the steps since the last start are used.

    :param path: output folder of the sweep.
    :param include_incomplete: also read runs without `done`, with status "running". Tables do not use them.
    """
    root = Path(path)
    files = sorted(root.glob("*/results.jsonl")) if root.is_dir() else []
    if not files:
        raise SandmaskError(
            f"{root} has no DomainBed results. Name the sweep's output folder, which contains a folder with a "
            "results.jsonl for each run."
        )
    runs: dict[str, tuple[RunRecord, Path]] = {}
    skipped = []
    for file in files:
        done = (file.parent / "done").exists()
        lines = _lines(file)
        if not lines or not (done or include_incomplete):
            skipped.append((file.parent, "no results yet" if not lines else "not finished (no file `done`)"))
            continue
        run = _run(file, lines, done)
        if run.spec.id in runs:
            raise SandmaskError(f"{runs[run.spec.id][1]} and {file} contain the same run. Remove one of them.")
        runs[run.spec.id] = (run, file)
    return Imported(tuple(run for run, _ in runs.values()), tuple(skipped))


def _lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines since the last start of the run. An incomplete last line is left out."""
    lines: list[dict[str, Any]] = []
    with file.open("rb") as source:
        for number, raw in enumerate(source, start=1):
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw)
                if lines and line["step"] <= lines[-1]["step"]:
                    lines.clear()
                lines.append(line)
            except RecursionError:
                raise SandmaskError(f"{file}:{number} is not a DomainBed record: it is nested too deeply.") from None
            except (ValueError, KeyError, TypeError) as error:
                raise SandmaskError(
                    f"{file}:{number} is not a DomainBed record ({error!r}). Restore the file, or remove its folder."
                ) from error
    return lines


def _run(file: Path, lines: Sequence[dict[str, Any]], done: bool) -> RunRecord:
    try:
        count = sum(1 for key in lines[0] if key.startswith("env") and key.endswith("_in_acc"))
        steps = np.array([line["step"] for line in lines], dtype=np.int64)
        names = sorted({key for line in lines for key in line if _is_metric(key, line[key])})
        run = RunRecord(
            spec=_spec(lines, steps, done),
            env_names=_environment_names(lines[0]["args"]["dataset"], count),
            steps=steps,
            accuracy_in=_accuracies(lines, count, "in"),
            accuracy_out=_accuracies(lines, count, "out"),
            metrics={name: np.array([float(line.get(name, np.nan)) for line in lines]) for name in names},
            status="done" if done else "running",
        )
        check_record(run)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SandmaskError(
            f"{file} is not a DomainBed results file ({error!r}). Restore the file, or remove its folder."
        ) from error
    return run


def _is_metric(key: str, value: Any) -> bool:
    return key not in _NOT_METRICS and not _ACCURACY.fullmatch(key) and isinstance(value, (int, float))


def _accuracies(lines: Sequence[dict[str, Any]], count: int, split: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([[line[f"env{env}_{split}_acc"] for env in range(count)] for line in lines], dtype=np.float64)


def _environment_names(dataset: str, count: int) -> tuple[str, ...]:
    """Return DomainBed's names of environments; numbers for those that its tables do not report."""
    known = held_out_environments(dataset)
    return tuple(known[env] if env < len(known) else str(env) for env in range(count))


def _spec(lines: Sequence[dict[str, Any]], steps: np.ndarray[Any, np.dtype[np.int64]], done: bool) -> RunSpec:
    args = lines[0]["args"]
    options = {name: args[name] for name, usual in _ASSUMED.items() if args.get(name, usual) != usual}
    spacing = int(steps[1] - steps[0]) if len(steps) > 1 else 1
    return RunSpec(
        dataset=args["dataset"],
        algorithm=args["algorithm"],
        test_envs=tuple(args["test_envs"]),
        # DomainBed's default depends on the dataset and is not recorded; the last step of a finished run shows it.
        steps=args.get("steps") or (int(steps[-1]) + 1 if done else 5001),
        checkpoint_every=args.get("checkpoint_freq") or spacing,
        hparams=dict(lines[0]["hparams"]),
        hparams_seed=args["hparams_seed"],
        trial_seed=args["trial_seed"],
        seed=args["seed"],
        space="domainbed",
        weights="domainbed",
        options={"source": "domainbed", **options},
    )
