"""`sandmask doctor`: checks the installation."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sandmask._text import counted
from sandmask.cli import _checks, _machine_checks, _options
from sandmask.cli._checks import Say, Status, errors
from sandmask.cli._console import print_json, styled

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("PROBLEM", "red")}
_INDENT = 29  # width of the mark and the name


def doctor(
    runs: Annotated[Path, typer.Option(help="Folder for runs, to check its disk space.")] = Path("runs"),
    data_dir: _options.DataDirOption = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also test torch.compile on the CPU, which takes half a minute.")
    ] = False,
    json: _options.JsonOption = False,
) -> None:
    """Check the installation, devices, extras, executors, data, weights, disk and shell, and suggest fixes.

    Each line is ok, a note (nothing is broken) or a problem. The exit status is 1 if there is a problem. The command
    downloads nothing and changes nothing.

    [bold]Examples[/bold]

    sandmask doctor

    sandmask doctor --data-dir /data/domains --runs /scratch/runs

    sandmask doctor --json
    """
    report = _Report(silent=json)
    report.examine("Installation", _checks.installation)
    report.examine("Devices", partial(_machine_checks.devices, thorough=thorough))
    report.examine("Extras", _checks.extras)
    report.examine("Sweeps", _machine_checks.executors)
    report.examine("Data", partial(_checks.data, data_dir=data_dir))
    report.examine("Pretrained weights", _checks.weights)
    report.examine("Disk", partial(_checks.disk, runs=runs, data_dir=data_dir))
    report.examine("Terminal", _checks.terminal)
    problems, notes = report.count("problem"), report.count("note")
    if json:
        print_json({"healthy": not problems, "findings": report.findings})
    elif problems:
        typer.echo(f"\n{counted(problems, 'problem')}, {counted(notes, 'note')}.")
    else:
        typer.echo(f"\nNo problems; {counted(notes, 'note')}." if notes else "\nNo problems.")
    if problems:
        raise typer.Exit(1)


@dataclass
class _Report:
    """Collects the findings, and prints each one as soon as it is known, unless it is silent."""

    silent: bool
    findings: list[dict[str, str | None]] = field(default_factory=list)

    def examine(self, topic: str, check: Callable[[Say], None]) -> None:
        """Run a check. If it raises an error, this is reported as a problem."""
        if not self.silent:
            typer.echo(styled(topic, bold=True))

        def say(name: str, status: Status, says: str, advice: str | None = None) -> None:
            self.findings.append({"topic": topic, "name": name, "status": status, "says": says, "advice": advice})
            if not self.silent:
                _print(name, status, says, advice)

        with errors(say, "check", "stopped", "fix the problems above first"):
            check(say)

    def count(self, status: Status) -> int:
        """The number of findings with this status."""
        return sum(finding["status"] == status for finding in self.findings)


def _print(name: str, status: Status, says: str, advice: str | None) -> None:
    """Print a finding, with its advice on the same line if it fits."""
    mark, colour = _MARKS[status]
    line = f"  {styled(f'{mark:<8}', fg=colour)}{name:<18} {says}"
    if advice:
        fits = _INDENT + len(says) + 4 + len(advice) <= shutil.get_terminal_size((100, 24)).columns
        line += f"{' ' if fits else chr(10) + ' ' * _INDENT}{styled('->', fg=colour)} {advice}"
    typer.echo(line)
    sys.stdout.flush()
