"""Common parts of the commands of `sandmask paper`: options, progress and output."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask.cli._console import print_json

if TYPE_CHECKING:
    from sandmask.paper._product import Product


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
    """Shows progress on standard error: a line that is updated in a terminal, occasional lines elsewhere."""

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
