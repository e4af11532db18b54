"""`sandmask paper`: a command for each figure and table of the paper."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask._text import counted
from sandmask.cli._console import print_json
from sandmask.cli._options import DataDirOption, DeviceOption, JsonOption, PrecisionOption
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from sandmask.paper._product import OnProgress, Product
    from sandmask.records import RunRecord
    from sandmask.reports import Grid

QuickOption = Annotated[
    bool, typer.Option("--quick", help="Make a small version within a minute on a CPU, only to try the command.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files.")]
RecordsOption = Annotated[
    list[Path] | None,
    typer.Option("--records", metavar="FILE|DIR", help="Records to use: a folder or an archive. Repeatable."),
]
OUT = Path("runs/paper")
_TERMINAL_SECONDS, _LINE_SECONDS = 0.2, 10.0  # between updates in a terminal, and between lines elsewhere
_FIRST_LINE_SECONDS = 3.0

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Reproduce the paper's figures and tables next to its numbers. Each command writes a picture (PNG, PDF) or a "
    "table (Markdown and LaTeX), and its data (CSV).",
)


@contextmanager
def _progress(*, quiet: bool) -> Iterator["OnProgress"]:
    """Show progress on standard error: one line that changes in a terminal, and separate lines elsewhere."""
    live = sys.stderr.isatty()
    next_time = time.monotonic() + (_TERMINAL_SECONDS if live else _FIRST_LINE_SECONDS)

    def show(task: str, done: int, total: int) -> None:
        nonlocal next_time
        if not quiet and time.monotonic() >= next_time:
            next_time = time.monotonic() + (_TERMINAL_SECONDS if live else _LINE_SECONDS)
            line = f"{100 * done // max(total, 1):3d}%  {task}"
            typer.echo(f"\r\033[K{line}" if live else line, err=True, nl=not live)

    try:
        yield show
    finally:
        if live and not quiet:
            typer.echo("\r\033[K", err=True, nl=False)


def _finish(product: "Product", out: Path, *, as_json: bool) -> None:
    """Write the files, and print the tables and the names of the files."""
    from sandmask.paper._product import write_product

    files = write_product(product, out)
    if as_json:
        print_json({"name": product.name, "files": [str(path) for path in files], **product.summary})
    else:
        _print(product.grids, files)


def _print(grids: "Sequence[Grid]", files: Sequence[Path]) -> None:
    from sandmask.reports import text

    if grids:
        typer.echo(text(grids))
    typer.echo("Wrote " + ", ".join(map(str, files)) + ".")


@app.command("figure-1")
def figure_1(quick: QuickOption = False, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Draw and count the dead zones in a landscape of two environments, and show what would remove them.

    [bold]Example[/bold]: sandmask paper figure-1 --quick --out runs/paper
    """
    from sandmask.paper.figure_1 import figure_1 as make

    with _progress(quiet=as_json) as on_progress:
        product = make(quick=quick, on_progress=on_progress)
    _finish(product, out, as_json=as_json)


@app.command("figure-3")
def figure_3(quick: QuickOption = False, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Draw the shape of the SAND-mask for several dispersions, with the AND-mask as its limit.

    [bold]Example[/bold]: sandmask paper figure-3
    """
    from sandmask.paper.figure_3 import figure_3 as make

    _finish(make(quick=quick), out, as_json=as_json)


def _add_table(name: str, about: str, records_example: str) -> None:
    """Add the command for a table of `paper.tables.TABLES`."""

    @app.command(name, help=f"{about}\n\n[bold]Example[/bold]: sandmask paper {name} --records {records_example}")
    def table(
        records: RecordsOption = None,
        quick: QuickOption = False,
        out: OutOption = OUT,
        device: DeviceOption = None,
        data_dir: DataDirOption = None,
        as_json: JsonOption = False,
    ) -> None:
        from sandmask.paper.tables import TABLES, read_all

        if records:
            product = TABLES[name].make(read_all(records))
        elif quick:
            product = TABLES[name].make(_tiny_runs(name, device, data_dir, quiet=as_json), draws=None, trials=None)
        else:
            raise TABLES[name].needs_records()
        _finish(product, out, as_json=as_json)


def _tiny_runs(table: str, device: str | None, data_dir: Path | None, *, quiet: bool) -> "list[RunRecord]":
    from sandmask.paper._train import TINY, run_tiny
    from sandmask.training import choose_device

    with _progress(quiet=quiet) as on_progress:
        runs = run_tiny(TINY[table], choose_device(device), data_dir, on_progress)
    if not quiet:
        typer.echo("This is a tiny sweep: its numbers say nothing about the methods.\n")
    return runs


_add_table(
    "table-1",
    "Training-domain validation: the datasets that the records have, next to the printed numbers.",
    "runs/mnist",
)
_add_table(
    "table-2",
    "Test-domain validation (oracle): the datasets that the records have, next to the printed numbers.",
    "runs/mnist",
)
_add_table(
    "table-3",
    "Spirals: the averages and the sixteen environments of the appendix, next to the printed numbers.",
    "runs/spirals",
)
_add_table("table-pacs", "PACS with a network other than the paper's ResNet-50.", "results/paper/pacs.records.parquet")


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
    _finish(make(read_all(records), dataset, question or ()), out, as_json=as_json)


@app.command("compact")
def compact(
    records: Annotated[list[Path], typer.Argument(metavar="FILE|DIR...", help="Records: folders or archives.")],
    archive: Annotated[Path, typer.Option("--archive", metavar="FILE", help="File to write: NAME.records.parquet.")],
    interval: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Keep the checkpoints of every N steps.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Make records smaller without changing a table: keep some checkpoints and all selected ones; drop training curves.

    [bold]Example[/bold]: sandmask paper compact runs/spirals --archive results/paper/spirals.records.parquet
    """
    from sandmask.paper._select import compact as make
    from sandmask.paper.tables import read_all
    from sandmask.records import write_archive

    runs = read_all(records)
    if not runs:
        raise SandmaskError(f"There are no runs in {', '.join(map(str, records))}.")
    write_archive(make(runs, interval), archive)
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
    """Plot accuracy on Spirals against momentum, noise and initialization, with 20 seeds each.

    Searches hyperparameters for each method, then trains. Rerun to resume. Use a GPU, or draw it from --records.

    [bold]Examples[/bold]

    sandmask paper figure-2 --quick

    sandmask paper figure-2 --device cuda --precision tf32 --out runs/paper

    sandmask paper figure-2 --records runs/paper/figure-2.records.parquet
    """
    from sandmask.paper.figure_2 import figure_2 as make
    from sandmask.paper.figure_2_runs import FULL, QUICK, train
    from sandmask.paper.tables import read_all
    from sandmask.records import write_archive
    from sandmask.training import choose_device

    if records:
        runs = read_all(records)
    else:
        design = QUICK if quick else FULL
        design = replace(design, seeds=seeds or design.seeds, steps=steps or design.steps, precision=precision)
        chosen = choose_device(device)
        if chosen.type == "cpu" and not quick and not as_json:
            typer.echo("note: on a CPU this takes days. --quick trains a small version.", err=True)
        with _progress(quiet=as_json) as on_progress:
            runs = train(design, out / "figure-2-runs", chosen, on_progress)
        write_archive(runs, out / "figure-2.records.parquet")
    _finish(make(runs), out, as_json=as_json)


@app.command("claims")
def claims(records: RecordsOption = None, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """Compute the numbers for the paper's claims that the records can test.

    [bold]Example[/bold]: sandmask paper claims --records results/paper
    """
    from sandmask.paper._product import write_product
    from sandmask.paper.claims import claims as make
    from sandmask.paper.tables import read_all

    if not records:
        raise SandmaskError("Name the records of Figure 2, Spirals or ColoredMNIST with --records.")
    products = make(read_all(records))
    files = [path for product in products for path in write_product(product, out)]
    if as_json:
        print_json({"claims": [product.name for product in products], "files": [str(path) for path in files]})
    else:
        _print([grid for product in products for grid in product.grids], files)


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
