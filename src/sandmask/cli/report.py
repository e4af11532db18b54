"""`sandmask report`: tables from records."""

from pathlib import Path
from typing import Annotated

import typer

from sandmask.records import read_runs
from sandmask.reports import FORMATS, build_report, render
from sandmask.selection import RULES

_PAPER = ("training-domain", "oracle")


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of records, a .jsonl file or an archive.")],
    selection: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A selection rule: {', '.join(RULES)}; or all. May be given several times. "
            f"(default: the paper's, {' and '.join(_PAPER)})",
            show_default=False,
        ),
    ] = None,
    format_name: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "text",
    against_paper: Annotated[
        bool, typer.Option("--against-paper", help="Put the paper's number, and the difference, beside ours.")
    ] = False,
    baseline: Annotated[str, typer.Option(help="The method that others are compared with.")] = "ERM",
    statistics: Annotated[bool, typer.Option(help="Whether to compare with the baseline.")] = True,
    draws: Annotated[int | None, typer.Option(min=1, help="Hyperparameter draws that a complete cell has.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials that a complete cell has.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of the screen.")] = None,
) -> None:
    """Print tables: one a dataset (columns are held-out environments), the averages, and comparisons.

    Numbers are mean ± standard error over trials, in percent.
    Cells without all their runs say how many there are; † marks cells with runs that diverged.

    [bold]Examples[/bold]

    sandmask report runs

    sandmask report runs --selection all --against-paper

    sandmask report runs --format latex --output tables.tex
    """
    names = list(RULES) if selection and "all" in selection else (selection or list(_PAPER))
    built = build_report(
        read_runs(directory),
        names,
        against_paper=against_paper,
        baseline=baseline,
        draws=draws,
        trials=trials,
    )
    text = render(built, format_name, statistics=statistics)
    if output is None:
        typer.echo(text, nl=False)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(output)
    typer.echo(f"Wrote {output}.")
