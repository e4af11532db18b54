"""`sandmask report --html`: the page, its messages, and the browser."""

import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from sandmask.cli._console import STANDARD_OUTPUT, counted
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, read_runs
from sandmask.reports import FORMATS

_MANY = 1000  # runs, from which on it takes long enough to say something


def read_with_patience(directory: Path) -> list[RunRecord]:
    """The runs below a folder, with a sign of life in a terminal: a large sweep takes a while to read."""
    from rich.console import Console

    with Console(stderr=True).status(f"Reading {directory}"):
        return read_runs(directory)


def write_page(runs: Sequence[RunRecord], target: Path, rules: Sequence[str] | None, **settings: Any) -> None:
    """Write the page and say so on standard error, which leaves standard output to tables, or to the page itself."""
    from sandmask.reports.html import render_html, write_html

    started = time.monotonic()
    if len(runs) >= _MANY:
        typer.echo(f"{len(runs):,} runs: computing tables, packing curves ...", err=True)
    if target == STANDARD_OUTPUT:
        typer.echo(render_html(runs, rules, **settings), nl=False)
        return
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
    if wanted and html in (None, STANDARD_OUTPUT):
        raise SandmaskError("--open shows the file that --html writes: add --html report.html.")


def check_format(name: str | None) -> None:
    """Whether there is such a format: before a large sweep is read, not after."""
    if name is not None and name.lower() == "html":
        raise SandmaskError("The page is not a --format: write it with --html FILE, such as --html report.html.")
    if name is not None:
        FORMATS[name]


def check_two_files(html: Path | None, tables: Path | None) -> None:
    """Whether page and tables have a file each: the second would replace the first, or follow it on the screen."""
    if html is not None and tables is not None and html.resolve() == tables.resolve():
        raise SandmaskError(f"The page and the tables both go to {html}. Give them a file each: --html and --output.")


def page_title(directory: Path) -> str:
    """The title of the page: the name of the folder or archive."""
    name = directory.resolve().name
    return name.removesuffix(".records.parquet").removesuffix(".jsonl") or "sandmask report"
