"""`sandmask report`: tables from records, as text or as a page."""

import re
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import sandmask
from sandmask._arguments import names_in
from sandmask._files import replacing
from sandmask._text import counted, in_shell, printable
from sandmask.cli import _completion, _options
from sandmask.cli._console import STANDARD_OUTPUT
from sandmask.errors import SandmaskError
from sandmask.plugins import load_plugins
from sandmask.records import MEASURES, RunRecord, read_runs, split_averages
from sandmask.records._reader import refuse_record_name
from sandmask.reports import FORMATS, render, run_command
from sandmask.reports._report import DEFAULT_RULES, MOST, rule_names
from sandmask.selection import ACCURACY

_MANY = 1000  # number of runs from which on a message is printed, because the page takes long
OWN_IMAGES = re.compile(r".+-[0-9a-f]{8}", re.DOTALL)  # their names in records: folder name and checksum


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of records, a .jsonl file or an archive.")],
    selection: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Selection rule (see: sandmask list rules), or all. Repeatable. "
            f"(default: the paper's rules, {' and '.join(DEFAULT_RULES)})",
            show_default=False,
            autocompletion=_completion.rule,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE|-", help="Write a page with tables, figures and every run's curves.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"One of {', '.join(FORMATS)}. (default: text)",
            show_default=False,
            autocompletion=_completion.words(*FORMATS),
        ),
    ] = None,
    as_json: _options.JsonOption = False,
    against_paper: Annotated[
        bool, typer.Option("--against-paper", help="Show the paper's number and the difference in each cell.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Compare with earlier records: show their number and the change in each cell."
        ),
    ] = None,
    baseline: Annotated[
        str, typer.Option(help="The method that others are compared with.", autocompletion=_completion.algorithm)
    ] = "ERM",
    statistics: Annotated[bool, typer.Option(help="Compare with the baseline.")] = True,
    draws: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MOST, help="Number of draws in a complete cell. (default: as many as there are)"
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MOST, help="Number of trials in a complete cell. (default: as many as there are)"
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="Metrics beyond accuracy to show, of those recorded: f1, ece, worst-group, per-class, confusion, all "
            "or none. (default: the first three)",
            autocompletion=_completion.words(*MEASURES, "all", "none"),
        ),
    ] = None,
    select_by: Annotated[
        str,
        typer.Option(
            metavar="METRIC",
            help="Metric that the rules select by: accuracy, f1, ece or worst-group.",
            autocompletion=_completion.words(ACCURACY, *(name for name, each in MEASURES.items() if not each.is_table)),
        ),
    ] = "accuracy",
    command: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Print the command that trains the run with this id, and no tables."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE|-", help="Write the tables to this file.")] = None,
    plugins: _options.PluginOption = None,
) -> None:
    """Print one table per dataset (columns are held-out environments), the averages, and comparisons.

    Numbers are mean ± standard error over trials, in percent. Incomplete cells state how many runs exist, and
    partial averages state the number of columns. † marks cells with runs that diverged. --html writes a self-contained
    page instead, by default with every selection rule.

    [bold]Examples[/bold]

    sandmask report runs

    sandmask report runs --selection all --against-paper

    sandmask report runs --html report.html --open

    sandmask report runs --format latex --output tables.tex

    sandmask report runs --metrics f1,confusion --select-by f1

    sandmask report runs --format csv --output cells.csv

    sandmask report runs --selection low-loss --plugin rules.py
    """
    load_plugins(plugins)
    format_name = _checked_format(format_name, as_json=as_json)
    tables = STANDARD_OUTPUT if output is None and (html is None or format_name) else output
    _check_files(html, tables, open_browser=open_browser)
    names = rule_names(selection, select_by)
    if command is not None:
        _write(f"{_command_of(directory, command)}\n", output or STANDARD_OUTPUT)
        return
    settings: dict[str, Any] = {
        "against_paper": against_paper,
        "baseline": baseline,
        "draws": draws,
        "trials": trials,
        "metrics": None if metrics is None else [name for name in names_in(metrics) if name != "none"],
    }
    built = None if tables is None else sandmask.report(directory, names, against=against, **settings)
    if html is not None:
        runs = _read(directory) if built is None else built.records
        on_page = names if selection or select_by != ACCURACY else None
        settings |= {"title": _title(directory), "earlier": None if against is None else _read(against)}
        _write_page(runs, html, on_page, statistics=statistics, **settings)
        if open_browser and not webbrowser.open(html.resolve().as_uri()):
            typer.echo(f"No browser was found. Open {html.resolve()} in one.", err=True)
    if built is not None and tables is not None:
        _write(render(built, format_name or "text", statistics=statistics), tables)


def _checked_format(name: str | None, *, as_json: bool) -> str | None:
    """The requested format. An error is raised before a large sweep is read."""
    if as_json and name not in (None, "json"):
        raise SandmaskError(f"Use --json or --format {name}, not both.")
    if name is not None and name.lower() == "html":
        raise SandmaskError("HTML is written with --html FILE, such as --html report.html, not with --format.")
    if as_json:
        return "json"
    return None if name is None else FORMATS[name].name


def _check_files(html: Path | None, tables: Path | None, *, open_browser: bool) -> None:
    if open_browser and html in (None, STANDARD_OUTPUT):
        raise SandmaskError("--open shows the file that --html writes: add --html report.html.")
    if html is not None and tables is not None and html.resolve() == tables.resolve():
        raise SandmaskError(f"--html and --output both write {html}. Name two different files.")
    for target in filter(None, (html, tables)):
        refuse_record_name(target)


def _read(directory: Path) -> list[RunRecord]:
    """The runs below a folder, with a message in a terminal, since a large sweep takes a while to read."""
    from rich.console import Console

    with Console(stderr=True).status(f"Reading {directory}"):
        return read_runs(directory)


def _title(directory: Path) -> str:
    """The title of the page: the name of the folder or archive."""
    name = directory.resolve().name
    return name.removesuffix(".records.parquet").removesuffix(".jsonl") or "sandmask report"


def _write_page(runs: Sequence[RunRecord], target: Path, rules: Sequence[str] | None, **settings: Any) -> None:
    """Write the page. Messages go to standard error, because standard output is for tables or the page."""
    from sandmask.reports.html import render_html, write_html

    started = time.monotonic()
    if len(runs) >= _MANY:
        typer.echo(f"{counted(len(runs), 'run')}: computing tables, packing curves ...", err=True)
    if target == STANDARD_OUTPUT:
        typer.echo(render_html(runs, rules, **settings), nl=False)
        return
    write_html(runs, target, rules, **settings)
    size = target.stat().st_size / 1e6
    took = f"{time.monotonic() - started:.0f} s"
    typer.echo(f"Wrote {target} ({size:.1f} MB, {counted(len(runs), 'run')}, {took}).", err=True)


def _command_of(directory: Path, run: str) -> str:
    """The command that trains the run whose id, in its folder or in a report, begins with `run`."""
    runs = _read(directory)
    records = {record.spec.id: record for record in (*split_averages(runs), *runs)}
    found = [record for name, record in records.items() if name.startswith(run)]
    if len(found) != 1:
        remedy = "Give a longer part of the id." if found else "The page of --html lists the runs with their ids."
        raise SandmaskError(f"{directory} holds {len(found) or 'no'} runs whose id begins with {run!r}. {remedy}")
    options = found[0].spec.options
    if kind := options.get("soup"):
        return f"sandmask soup {in_shell(directory)} --kind {kind} --of {options.get('average', 'weights')}"
    if OWN_IMAGES.fullmatch(dataset := found[0].spec.dataset):
        typer.echo(
            f"note: {printable(dataset)} is a dataset of your own. Write its path instead of this name.", err=True
        )
    if source := options.get("source"):
        raise SandmaskError(f"Run {run} was imported from {source}. It can only be trained again there.")
    return run_command(found[0])


def _write(text: str, output: Path) -> None:
    if output == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    typer.echo(f"Wrote {output}.", err=True)
