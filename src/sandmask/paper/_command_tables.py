"""The tables of `sandmask paper`, from records or, quickly, from a tiny sweep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sandmask.cli._options import DataDirOption, DeviceOption, JsonOption
from sandmask.paper._command_options import OUT, OutOption, Progress, QuickOption, RecordsOption, finish

if TYPE_CHECKING:
    from sandmask.paper.quick import TinySweep
    from sandmask.records import RunRecord


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
