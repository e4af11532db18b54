"""`sandmask paper`: the paper's figures and tables, remade, one command each."""

from pathlib import Path
from typing import Annotated

import typer

from sandmask._text import counted
from sandmask.cli._console import print_json
from sandmask.cli._options import DeviceOption, JsonOption, PrecisionOption
from sandmask.errors import SandmaskError
from sandmask.paper._command_parts import OUT, TABLES, OutOption, Progress, QuickOption, RecordsOption, finish

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Reproduce the paper's figures and tables next to its numbers. Each command writes a picture (PNG, PDF) or a "
    "table (Markdown and LaTeX), and its data (CSV).",
)


@app.command("figure-1")
def figure_1(quick: QuickOption = False, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Draw and count the dead zones in a landscape of two environments, and show what would remove them.

    [bold]Example[/bold]: sandmask paper figure-1 --quick --out runs/paper
    """
    from sandmask.paper.figure_1 import figure_1 as make

    progress = Progress(quiet=as_json)
    product = make(quick=quick, report=progress)
    progress.close()
    finish(product, out, as_json=as_json)


@app.command("figure-3")
def figure_3(quick: QuickOption = False, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Draw the shape of the SAND-mask for several dispersions, with the AND-mask as its limit.

    [bold]Example[/bold]: sandmask paper figure-3
    """
    from sandmask.paper.figure_3 import figure_3 as make

    finish(make(quick=quick), out, as_json=as_json)


for each in TABLES:
    each.add_to(app)


@app.command("why")
def why(
    dataset: Annotated[str, typer.Argument(help="The dataset of the table.")],
    records: RecordsOption = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="One of: ties, frequency, rules, tau, rescale; for Spirals also spiral, draws, signatures, contrary. "
            "Repeatable. Default: all of them.",
        ),
    ] = None,
    out: OutOption = OUT,
    as_json: JsonOption = False,
) -> None:
    """Show a table under other choices: tie-breaking, fewer evaluations, other rules, a narrower tau, rescaling.

    [bold]Example[/bold]: sandmask paper why Spirals --records runs/spirals --question ties
    """
    from sandmask.paper.tables import read_all
    from sandmask.paper.why import why as make

    if not records:
        raise SandmaskError(f"Name records of {dataset} with --records: a folder or an archive.")
    finish(make(read_all(records), dataset, question or ()), out, as_json=as_json)


@app.command("compact")
def compact(
    records: Annotated[list[Path], typer.Argument(metavar="FILE|DIR...", help="Records: folders or archives.")],
    archive: Annotated[Path, typer.Option("--archive", metavar="FILE", help="File to write: NAME.records.parquet.")],
    interval: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Keep the checkpoints of every N steps.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Make records smaller without changing a table: keep some checkpoints and all selected ones; drop loss curves.

    [bold]Example[/bold]: sandmask paper compact runs/spirals --archive results/paper/spirals.records.parquet
    """
    from sandmask.paper.compact import compact as make
    from sandmask.paper.tables import read_all
    from sandmask.records import write_archive

    runs = read_all(records)
    if not runs:
        raise SandmaskError(f"There are no runs in {', '.join(map(str, records))}.")
    write_archive(make(runs, interval), archive, metrics=False)
    size = archive.stat().st_size
    if as_json:
        print_json({"runs": len(runs), "archive": str(archive), "bytes": size, "every": interval})
    else:
        typer.echo(f"Wrote {archive}: {counted(len(runs), 'run')}, {size / 2**20:.1f} MiB.")


@app.command("figure-2")
def figure_2(
    records: RecordsOption = None,
    quick: QuickOption = False,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Seeds per point. (default: 20)")] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=11, help="Training steps. (default: 3,001; the protocol has 5,001)"),
    ] = None,
    precision: PrecisionOption = "fp32",
    out: OutOption = OUT,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Failure modes on Spirals: accuracy against momentum, noise and initialization, 20 seeds each.

    Searches hyperparameters for each method, then trains. Rerun to resume. Use a GPU, or draw it from --records.

    [bold]Examples[/bold]

    sandmask paper figure-2 --quick

    sandmask paper figure-2 --device cuda --precision tf32 --out runs/paper

    sandmask paper figure-2 --records runs/paper/figure-2.records.parquet
    """
    from dataclasses import replace

    from sandmask.paper._failure_runs import FULL, QUICK, train
    from sandmask.paper.figure_2 import figure_2 as make
    from sandmask.paper.tables import read_all
    from sandmask.records import write_archive
    from sandmask.training import choose_device

    if records:
        runs = read_all(records)
    else:
        progress = Progress(quiet=as_json)
        design = QUICK if quick else FULL
        design = replace(design, seeds=seeds or design.seeds, steps=steps or design.steps, precision=precision)
        chosen = choose_device(device)
        if chosen.type == "cpu" and not quick and not as_json:
            typer.echo("note: on a CPU this takes days. --quick trains a small version.", err=True)
        runs = train(design, out / "figure-2-runs", chosen, progress)
        progress.close()
        write_archive(runs, out / "figure-2.records.parquet")
    finish(make(runs), out, as_json=as_json)


@app.command("claims")
def claims(records: RecordsOption = None, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Compute the numbers for the paper's claims that the records can test.

    [bold]Example[/bold]: sandmask paper claims --records results/paper
    """
    from sandmask.paper._product import write_product
    from sandmask.paper.claims import claims as make
    from sandmask.paper.tables import read_all
    from sandmask.reports import text

    if not records:
        raise SandmaskError("Name the records of Figure 2, Spirals or ColoredMNIST with --records.")
    products = make(read_all(records))
    files = [path for product in products for path in write_product(product, out)]
    if as_json:
        print_json({"claims": [product.name for product in products], "files": [str(path) for path in files]})
        return
    typer.echo(text([grid for product in products for grid in product.grids]))
    typer.echo("Wrote " + ", ".join(map(str, files)) + ".")


@app.command("pages")
def pages(
    results: Annotated[Path, typer.Option(help="Folder with the files that the other commands wrote.")] = Path(
        "results/paper"
    ),
    docs: Annotated[Path, typer.Option(help="The documentation's folder.")] = Path("docs"),
) -> None:
    """Fill the tables, pictures and numbers of the documentation's pages.

    [bold]Example[/bold]: sandmask paper pages --results results/paper --docs docs
    """
    from sandmask.paper.pages import fill_pages

    changed = fill_pages(results, docs)
    typer.echo("Changed " + ", ".join(map(str, changed)) + "." if changed else "All pages are up to date.")
