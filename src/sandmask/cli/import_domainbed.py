"""`sandmask import-domainbed`: convert a DomainBed sweep to records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sandmask._text import counted, in_shell, printable
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, read_domainbed, read_runs, write_archive


def import_domainbed(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The sweep's output folder.")],
    out: Annotated[Path, typer.Option(metavar="STORE", help="The folder of records to write into.")],
    include_incomplete: Annotated[
        bool, typer.Option("--include-incomplete", help="Also import runs without a file `done`, as unfinished.")
    ] = False,
) -> None:
    """Convert the results of a DomainBed sweep (`*/results.jsonl`) to an archive that `sandmask report` reads.

    [bold]Examples[/bold]

    sandmask import-domainbed ~/domainbed/sweep --out imported

    sandmask report imported
    """
    imported = read_domainbed(directory, include_incomplete=include_incomplete)
    for folder, why in imported.skipped:
        typer.echo(f"Skipped {printable(str(folder))}: {why}.", err=True)
    if not imported.runs:
        found = f"({len(imported.skipped)} found)"
        if include_incomplete:
            raise SandmaskError(f"No run in {directory} has results yet {found}.")
        raise SandmaskError(
            f"No run in {directory} is finished {found}. Import them as unfinished with --include-incomplete."
        )
    archive = out / f"{directory.resolve().name}.records.parquet"
    _check_nothing_is_lost(imported.runs, archive)
    write_archive(imported.runs, archive)
    typer.echo(
        f"Imported {counted(len(imported.runs), 'run')} ({len(imported.skipped)} skipped) into {archive}. "
        f"Now: sandmask report {in_shell(out)}"
    )


def _check_nothing_is_lost(runs: Sequence[RunRecord], archive: Path) -> None:
    """Refuse to replace an archive that holds other runs. The same sweep may be imported again with more runs."""
    if not archive.exists():
        return
    kept = {run.spec.id for run in runs}
    lost = sum(run.spec.id not in kept for run in read_runs(archive))
    if lost:
        raise SandmaskError(
            f"{archive} would lose {counted(lost, 'run')} that the {len(runs)} imported runs do not include. Choose "
            "another folder with --out, or remove this file."
        )
