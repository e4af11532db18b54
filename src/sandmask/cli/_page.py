"""`sandmask report --html`: the page, its messages, and the browser."""

import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from sandmask.cli._console import counted
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, read_runs

_MANY = 1000  # runs, from which on it takes long enough to say something


def read_with_patience(directory: Path) -> list[RunRecord]:
    """The runs below a folder, with a sign of life in a terminal: a large sweep takes a while to read."""
    from rich.console import Console

    with Console(stderr=True).status(f"Reading {directory}"):
        return read_runs(directory)


def write_page(runs: Sequence[RunRecord], target: Path, rules: Sequence[str] | None, **settings: Any) -> None:
    """Write the page and say so on standard error, which leaves standard output to tables."""
    from sandmask.reports.html import write_html

    started = time.monotonic()
    if len(runs) >= _MANY:
        typer.echo(f"{len(runs):,} runs: computing tables, packing curves ...", err=True)
    write_html(runs, target, rules, **settings)
    size = target.stat().st_size / 1e6
    took = f"{time.monotonic() - started:.0f} s"
    typer.echo(f"Wrote {target} ({size:.1f} MB, {counted(len(runs), 'run')}, {took}).", err=True)


def open_page(target: Path) -> None:
    """Show the page in the browser; where there is none, say where the page is."""
    if not webbrowser.open(target.resolve().as_uri()):
        typer.echo(f"No browser was found. Open {target.resolve()} in one.", err=True)


def check_open(html: Path | None, wanted: bool) -> None:
    """Whether there is something to open."""
    if wanted and html is None:
        raise SandmaskError("--open shows the page that --html writes: add --html report.html.")


def check_two_files(html: Path | None, output: Path | None) -> None:
    """Whether page and tables have a file each: the second would replace the first."""
    if html is not None and output is not None and html.resolve() == output.resolve():
        raise SandmaskError(f"--html and --output both name {html}. Give the page and the tables a file each.")


def page_title(directory: Path) -> str:
    """What the page is called: the name of the folder or archive."""
    name = directory.resolve().name
    return name.removesuffix(".records.parquet").removesuffix(".jsonl") or "sandmask report"
