"""Parts of the commands of `sandmask paper`: options, progress, what is printed at the end, and the tables."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandmask.cli._console import print_json
from sandmask.cli._options import DataDirOption, DeviceOption, JsonOption

if TYPE_CHECKING:
    from sandmask.paper._product import Product
    from sandmask.paper.quick import TinySweep
    from sandmask.records import RunRecord


QuickOption = Annotated[
    bool, typer.Option("--quick", help="Make a small version in less than a minute on a CPU. Its numbers mean little.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files.")]
RecordsOption = Annotated[
    list[Path] | None,
    typer.Option("--records", metavar="FILE|DIR", help="Records to use: a folder or an archive. Repeatable."),
]
OUT = Path("runs/paper")
_LINE_SECONDS = 10.0
_FIRST_LINE_SECONDS = 3.0


class Progress:
    """Tells on standard error what is being done: a line that changes in a terminal, lines now and then elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._live = sys.stderr.isatty()
        self._next = time.monotonic() + (0.2 if self._live else _FIRST_LINE_SECONDS)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Tell, if it is time to."""
        now = time.monotonic()
        if self.quiet or now < self._next:
            return
        self._next = now + (0.2 if self._live else _LINE_SECONDS)
        line = f"{100 * done // max(total, 1):3d}%  {what}"
        typer.echo(f"\r\033[K{line}" if self._live else line, err=True, nl=not self._live)

    def close(self) -> None:
        """Leave a clean line."""
        if self._live and not self.quiet:
            typer.echo("\r\033[K", err=True, nl=False)


def finish(product: "Product", out: Path, *, as_json: bool) -> None:
    """Write the files; print the numbers and where the files are."""
    from sandmask.paper._product import write_product
    from sandmask.reports import text

    files = write_product(product, out)
    if as_json:
        print_json({"name": product.name, "files": [str(path) for path in files], **product.summary})
        return
    if product.grids:
        typer.echo(text(product.grids))
    typer.echo("Wrote " + ", ".join(str(path) for path in files) + ".")


@dataclass(frozen=True)
class PaperTable:
    """A table: the function of its name in `paper.tables` makes it, and `tiny` takes its sweeps from `paper.quick`."""

    name: str
    title: str
    about: str
    example: str  # of records
    configs: tuple[str, ...]  # of the sweeps in results/paper whose records it is made from
    tiny: Callable[[Any], "Sequence[TinySweep]"]

    def add_to(self, app: typer.Typer) -> None:
        """Make it a command."""
        about = f"{self.about}\n\n[bold]Example[/bold]: sandmask paper {self.name} --records {self.example}"

        @app.command(self.name, help=about)
        def table(
            records: RecordsOption = None,
            quick: QuickOption = False,
            out: OutOption = OUT,
            device: DeviceOption = None,
            data_dir: DataDirOption = None,
            as_json: JsonOption = False,
        ) -> None:
            from sandmask.paper import tables

            make = getattr(tables, self.name.replace("-", "_"))
            if records:
                product = make(tables.read_all(records))
            elif quick:
                product = make(self._tiny_runs(device, data_dir, quiet=as_json), draws=None, trials=None)
            else:
                raise tables.no_records(self.title, self.configs)
            finish(product, out, as_json=as_json)

    def _tiny_runs(self, device: str | None, data_dir: Path | None, *, quiet: bool) -> "list[RunRecord]":
        from sandmask.paper import quick
        from sandmask.training import choose_device

        progress = Progress(quiet=quiet)
        runs = quick.run_tiny(self.tiny(quick), choose_device(device), data_dir, progress)
        progress.close()
        if not quiet:
            typer.echo("This is a tiny sweep: its numbers say nothing about the methods.\n")
        return runs


TABLES = (
    PaperTable(
        "table-1",
        "Table 1",
        "Training-domain validation: the datasets that the records have, next to the printed numbers.",
        "runs/mnist",
        ("colored_mnist", "rotated_mnist"),
        lambda quick: quick.MNIST,
    ),
    PaperTable(
        "table-2",
        "Table 2",
        "Test-domain validation (oracle): the datasets that the records have, next to the printed numbers.",
        "runs/mnist",
        ("colored_mnist", "rotated_mnist"),
        lambda quick: quick.MNIST,
    ),
    PaperTable(
        "table-3",
        "Table 3",
        "Spirals: the averages and the sixteen environments of the appendix, next to the printed numbers.",
        "runs/spirals",
        ("spirals",),
        lambda quick: (quick.SPIRALS,),
    ),
    PaperTable(
        "table-pacs",
        "The table of PACS",
        "PACS with a network other than the paper's ResNet-50.",
        "results/h200/pacs.records.parquet",
        ("pacs",),
        lambda quick: (quick.PACS,),
    ),
)
