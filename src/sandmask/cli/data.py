"""`sandmask data`: list, download, verify and find datasets."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask._text import printable
from sandmask.cli import _completion, _options
from sandmask.cli._console import print_json, print_table

if TYPE_CHECKING:
    from sandmask.datasets.download import Verification
    from sandmask.datasets.sources import Source

app = typer.Typer(help="List, download, verify and find datasets.", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the datasets. [default: $SANDMASK_DATA, ./data, ~/.cache/sandmask/data]", show_default=False
    ),
]


@app.command("list")
def list_datasets(data_dir: DataDir = None, as_json: _options.JsonOption = False) -> None:
    """List the datasets and whether they are on this machine."""
    from sandmask.datasets import data_folder
    from sandmask.datasets.sources import overview

    folder = data_folder(data_dir)
    rows = overview(folder)
    if as_json:
        print_json({"data_dir": str(folder), "datasets": [asdict(row) for row in rows]})
        return
    cells = [
        (
            row.name,
            " ".join(row.environments),
            str(row.classes),
            f"{row.images:,}" if row.images else "",
            "generated" if row.generated else "yes" if row.path else "no",
        )
        for row in rows
    ]
    print_table(f"Datasets in {folder}", ("name", "environments", "classes", "images", "here"), cells)


@app.command()
def where(
    name: Annotated[
        str | None, typer.Argument(help="A dataset; without one, the data folder.", autocompletion=_completion.dataset)
    ] = None,
    data_dir: DataDir = None,
    as_json: _options.JsonOption = False,
) -> None:
    """Print where a dataset is, or where to put it."""
    from sandmask.datasets import data_folder
    from sandmask.datasets.sources import source_of

    folder = data_folder(data_dir)
    if name is None:
        if as_json:
            print_json({"data_dir": str(folder)})
        else:
            typer.echo(folder)
        return
    source = source_of(name)
    found = source.find(folder)
    if as_json:
        expected = str(folder / source.folder)
        print_json({"name": source.name, "path": str(found) if found else None, "expected_at": expected})
    else:
        typer.echo(found or f"{folder / source.folder} (does not exist yet)")


@app.command()
def download(
    names: Annotated[
        list[str], typer.Argument(help="Datasets, such as PACS or MNIST.", autocompletion=_completion.dataset)
    ],
    data_dir: DataDir = None,
    replace: Annotated[bool, typer.Option("--replace", help="Download again and replace an existing dataset.")] = False,
    keep_archives: Annotated[bool, typer.Option("--keep-archives", help="Keep the downloaded archives.")] = False,
) -> None:
    """Download datasets, check them, and put them in place. Interrupted downloads are resumed."""
    from sandmask.datasets import data_folder
    from sandmask.datasets.sources import source_of

    folder = data_folder(data_dir)
    wanted = {source.name: source for source in map(source_of, names)}
    complete = True
    for source in wanted.values():
        complete &= _download(source, folder, replace, keep_archives)
    if not complete:
        raise typer.Exit(1)


@app.command("verify")
def verify_datasets(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Datasets, or your own folders, manifests and .npz files. (default: all datasets that exist)",
            autocompletion=_completion.dataset,
        ),
    ] = None,
    data_dir: DataDir = None,
    contents: Annotated[bool, typer.Option("--contents", help="Also read and decode every image.")] = False,
    allow_missing_classes: _options.MissingClassesOption = False,
    as_json: _options.JsonOption = False,
) -> None:
    """Check the domains, classes, counts and checksums of datasets on the disk. Exit status 1 if one is wrong."""
    from sandmask.datasets import data_folder
    from sandmask.datasets._lookup import is_own
    from sandmask.datasets.download import verify, verify_own
    from sandmask.datasets.sources import SOURCES, source_of

    folder = data_folder(data_dir)
    own = [name for name in names or () if name not in SOURCES and is_own(name)]
    asked = [source_of(name) for name in names if name not in own] if names else list(SOURCES.values())
    chosen = {source.name: source for source in asked}
    results = [verify(source, folder, contents=contents) for source in chosen.values()]
    results += [verify_own(name, contents=contents, allow_missing_classes=allow_missing_classes) for name in own]
    if not names:
        results = [result for result in results if result.status != "missing"]
    if as_json:
        print_json([asdict(result) for result in results])
    elif not results:
        typer.echo(f"There are no datasets in {folder}.")
    else:
        for result in results:
            _print_verification(result)
    if any(result.status != "ok" for result in results):
        raise typer.Exit(1)


def _download(source: "Source", folder: Path, replace: bool, keep_archives: bool) -> bool:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from sandmask.datasets.download import install

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {file.name: bars.add_task(file.name, total=file.size, start=False) for file in source.files}

        def show(name: str, done: int, total: int | None) -> None:
            bars.start_task(tasks[name])
            bars.update(tasks[name], completed=done, total=total)

        done = install(source, folder, replace=replace, keep_archives=keep_archives, progress=show)
    typer.echo(printable(f"{source.name}: {done.path} ({done.note}; from {', '.join(done.origins)})"))
    _print_verification(done.verification)
    return done.verification.status == "ok"


def _print_verification(result: "Verification") -> None:
    counts = ", ".join(f"{printable(domain)} {count:,}" for domain, count in result.counts.items())
    typer.echo(f"{result.name}: {result.status}{f' ({counts})' if counts else ''}")
    for line in (*result.problems, *result.notes):
        typer.echo(f"  {printable(line)}")
