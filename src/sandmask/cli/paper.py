"""`sandmask paper`: the paper's figures and tables, remade, one command each."""

import typer

from sandmask.cli._options import JsonOption
from sandmask.cli._paper_output import OUT, OutOption, Progress, QuickOption, finish

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Remake the paper's figures and tables next to its numbers. Each writes its picture (PNG and PDF) or table "
    "(Markdown and LaTeX), and the data behind it (CSV).",
)


@app.command("figure-1")
def figure_1(quick: QuickOption = False, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Dead zones in a landscape of two environments, drawn and counted; and what would remove them.

    [bold]Example[/bold]: sandmask paper figure-1 --quick --out runs/paper
    """
    from sandmask.paper.figure_1 import figure_1 as make

    progress = Progress(quiet=as_json)
    product = make(quick=quick, report=progress)
    progress.close()
    finish(product, out, as_json=as_json)


@app.command("figure-3")
def figure_3(quick: QuickOption = False, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """The shape of the SAND-mask for several dispersions, and the AND-mask that it tends to.

    [bold]Example[/bold]: sandmask paper figure-3
    """
    from sandmask.paper.figure_3 import figure_3 as make

    finish(make(quick=quick), out, as_json=as_json)
