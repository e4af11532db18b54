"""`sandmask doctor`: checks the installation."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from sandmask.cli._console import counted, print_json, styled
from sandmask.cli._options import DataDirOption, JsonOption

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
    data_dir: DataDirOption = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also test torch.compile on the CPU, which takes half a minute.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check the installation, devices, extras, executors, data, weights, disk and shell, and suggest fixes.

    Each line is ok, a note (nothing is broken) or a problem. The exit status is 1 if there is a problem. The command
    downloads and changes nothing.

    [bold]Examples[/bold]

    sandmask doctor

    sandmask doctor --data-dir /data/domains --runs /scratch/runs

    sandmask doctor --json
    """
    found: dict[str, list[Finding]] = {}
    for topic, check in _checks(runs, data_dir, thorough=thorough).items():
        if not json:
            typer.echo(styled(topic, bold=True))
        found[topic] = list(_shown(check, silent=json))
    findings = [finding for lines in found.values() for finding in lines]
    unhealthy = any(finding.status == "problem" for finding in findings)
    if json:
        lines = [{"topic": topic, **asdict(finding)} for topic, several in found.items() for finding in several]
        print_json({"healthy": not unhealthy, "findings": lines})
    else:
        typer.echo(_verdict(findings))
    if unhealthy:
        raise typer.Exit(1)


def _checks(runs: Path, data_dir: Path | None, *, thorough: bool) -> dict[str, Check]:
    from sandmask.cli import _check_installation as installation
    from sandmask.cli import _check_machine as machine

    return {
        "Installation": installation.installation,
        "Devices": partial(machine.devices, thorough=thorough),
        "Extras": installation.extras,
        "Sweeps": machine.executors,
        "Data": partial(installation.data, data_dir),
        "Pretrained weights": installation.weights,
        "Disk": partial(installation.disk, runs, data_dir),
        "Terminal": installation.terminal,
    }


def _shown(check: Check, *, silent: bool) -> Iterator[Finding]:
    """The findings of a check, each printed as soon as it is known. A check that fails is a problem, too."""
    try:
        for finding in check():
            if not silent:
                _print(finding)
            yield finding
    except Exception as error:  # noqa: BLE001 - the command is run when things are broken
        failed = problem("check", f"stopped: {first_line(error)}", "fix the problems above first")
        if not silent:
            _print(failed)
        yield failed


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
