"""`sandmask doctor`: checks the installation."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from sandmask._text import counted
from sandmask.cli import _options
from sandmask.cli._console import print_json, styled

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A line of the examination. A note is worth knowing, a problem keeps something from working."""

    name: str
    status: Status
    says: str
    advice: str | None = None


Check = Callable[[], Iterable[Finding]]


def ok(name: str, says: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", says)


def note(name: str, says: str, advice: str | None = None) -> Finding:
    """Something that can be better, or is not there and need not be."""
    return Finding(name, "note", says, advice)


def problem(name: str, says: str, advice: str) -> Finding:
    """Something that does not work, and what to do."""
    return Finding(name, "problem", says, advice)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def gibibytes(n_bytes: float) -> str:
    """A size, for people."""
    return f"{n_bytes / 2**30:,.1f} GiB"


_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "problem": ("PROBLEM", "red"),
}
_INDENT = 29  # width of the mark and the name


def doctor(
    runs: Annotated[Path, typer.Option("--runs", help="Folder for runs, to check its disk space.")] = Path("runs"),
    data_dir: _options.DataDirOption = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also test torch.compile on the CPU, which takes half a minute.")
    ] = False,
    json: _options.JsonOption = False,
) -> None:
    """Check the installation, devices, extras, executors, data, weights, disk and shell, and suggest fixes.

    Each line is ok, a note (nothing is broken) or a problem. The exit status is 1 if there is a problem. The command
    downloads and changes nothing.

    [bold]Examples[/bold]

    sandmask doctor

    sandmask doctor --data-dir /data/domains --runs /scratch/runs

    sandmask doctor --json
    """
    found: list[tuple[str, Finding]] = []
    for topic, check in _checks(runs, data_dir, thorough=thorough).items():
        if not json:
            typer.echo(styled(topic, bold=True))
        for finding in _findings(check):
            found.append((topic, finding))
            if not json:
                _print(finding)  # as soon as it is known
    unhealthy = any(finding.status == "problem" for _, finding in found)
    if json:
        lines = [{"topic": topic, **asdict(finding)} for topic, finding in found]
        print_json({"healthy": not unhealthy, "findings": lines})
    else:
        typer.echo(_verdict([finding for _, finding in found]))
    if unhealthy:
        raise typer.Exit(1)


def _checks(runs: Path, data_dir: Path | None, *, thorough: bool) -> dict[str, Check]:
    from sandmask.cli import _checks as checks

    return {
        "Installation": checks.installation,
        "Devices": partial(checks.devices, thorough=thorough),
        "Extras": checks.extras,
        "Sweeps": executors,
        "Data": partial(checks.data, data_dir),
        "Pretrained weights": checks.weights,
        "Disk": partial(checks.disk, runs, data_dir),
        "Terminal": lambda: (*checks.plugins(), *checks.completion()),
    }


_SLURM = ("sbatch", "squeue", "scancel")
_PATIENCE = 10  # seconds for an answer of squeue


def executors() -> Iterator[Finding]:
    """Slurm, Ray, and NVIDIA's Multi-Process Service. Nothing else needs them, so that faults are notes."""
    yield _slurm()
    yield _ray()
    import torch

    if torch.cuda.is_available():
        yield _mps()


def _slurm() -> Finding:
    missing = [name for name in _SLURM if not shutil.which(name)]
    if len(missing) == len(_SLURM):
        return note("Slurm", "not on this machine; only --executor slurm needs it")
    if missing:
        return note("Slurm", f"{', '.join(missing)} not found", "add Slurm's commands to PATH")
    if find_spec("submitit") is None:
        return note("Slurm", "submitit is not installed; --executor slurm needs it", "pip install 'sandmask[slurm]'")
    try:
        command = ["squeue", "--noheader", "--me"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return note("Slurm", f"squeue does not answer: {first_line(error)}", "check the cluster: sinfo")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return note("Slurm", f"installed, but squeue fails: {said[-1]}", "check the cluster: sinfo")
    return ok("Slurm", "answers")


def _ray() -> Finding:
    if find_spec("ray") is None:
        return note("Ray", "not installed; only --executor ray needs it", "pip install 'sandmask[ray]'")
    address = os.environ.get("RAY_ADDRESS")
    return ok(
        "Ray", f"installed; RAY_ADDRESS is {address}" if address else "installed; sweeps start it here by default"
    )


def _mps() -> Finding:
    """MPS lets several processes compute on one GPU at the same time."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's default
    if (pipes / "control").exists():
        return ok("NVIDIA MPS", "is running: several workers can share a GPU")
    advice = "nvidia-cuda-mps-control -d" if shutil.which("nvidia-cuda-mps-control") else None
    return note("NVIDIA MPS", "is not running: several workers on one GPU would take turns", advice)


def _findings(check: Check) -> Iterator[Finding]:
    """The findings of a check. A check that fails is a problem, too."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - the command is run when things are broken
        yield problem("check", f"stopped: {first_line(error)}", "fix the problems above first")


def _print(finding: Finding) -> None:
    """Print a finding, with its advice on the same line if it fits."""
    mark, colour = _MARKS[finding.status]
    line = f"  {styled(f'{mark:<8}', fg=colour)}{finding.name:<18} {finding.says}"
    if finding.advice:
        fits = _INDENT + len(finding.says) + 4 + len(finding.advice) <= shutil.get_terminal_size((100, 24)).columns
        line += f"{' ' if fits else chr(10) + ' ' * _INDENT}{styled('->', fg=colour)} {finding.advice}"
    typer.echo(line)
    sys.stdout.flush()


def _verdict(findings: list[Finding]) -> str:
    problems, notes = (sum(f.status == status for f in findings) for status in ("problem", "note"))
    if problems:
        return f"\n{counted(problems, 'problem')}, {counted(notes, 'note')}."
    return f"\nNo problems; {counted(notes, 'note')}." if notes else "\nNo problems."
