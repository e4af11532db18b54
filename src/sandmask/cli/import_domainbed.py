"""`sandmask import-domainbed`: a DomainBed sweep as our records."""

from pathlib import Path
from typing import Annotated

import typer

from sandmask.errors import SandmaskError
from sandmask.records import read_domainbed, write_archive


def import_domainbed(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The sweep's output folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="STORE", help="The folder of records to write into.")],
    include_incomplete: Annotated[
        bool, typer.Option("--include-incomplete", help="Also take runs without `done`, as unfinished.")
    ] = False,
) -> None:
    """Read a DomainBed sweep (`*/results.jsonl`) into an archive that `sandmask report` makes tables of.

    [bold]Examples[/bold]

    sandmask import-domainbed ~/domainbed/sweep --out imported

    sandmask report imported
    """
    imported = read_domainbed(directory, include_incomplete=include_incomplete)
    for folder, why in imported.skipped:
        typer.echo(f"Skipped {folder}: {why}.", err=True)
    if not imported.runs:
        raise SandmaskError(
            f"None of the {len(imported.skipped)} runs in {directory} is finished. "
            "Take them as they are with --include-incomplete."
        )
    archive = out / f"{directory.resolve().name}.records.parquet"
    write_archive(imported.runs, archive)
    typer.echo(
        f"Imported {len(imported.runs)} runs ({len(imported.skipped)} skipped) into {archive}. "
        f"Now: sandmask report {out}"
    )
