"""The tables of `sandmask paper`, from records or, quickly, from a tiny sweep."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sandmask.cli._paper_output import Progress, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sandmask.paper._product import Product
    from sandmask.paper.quick import TinySweep
    from sandmask.records import RunRecord


def make_table(
    item: str,
    make: "Callable[..., Product]",
    *,
    configs: "Sequence[str]",
    records: list[Path] | None,
    tiny: "Sequence[TinySweep] | None",
    device: str | None,
    data_dir: Path | None,
    out: Path,
    as_json: bool,
    complete: tuple[int | None, int | None] = (20, 3),
) -> None:
    """Build a table from records, or from the tiny sweeps given; write and print it."""
    from sandmask.paper._tables import no_records, read_all

    runs: list[RunRecord]
    if records:
        runs = read_all(records)
        draws, trials = complete
    elif tiny:
        runs = _tiny_runs(tiny, device, data_dir, quiet=as_json)
        draws = trials = None
        if not as_json:
            typer.echo("A tiny sweep: a look at the table, not at the methods.\n")
    else:
        raise no_records(item, configs)
    finish(make(runs, draws=draws, trials=trials), out, as_json=as_json)


def _tiny_runs(
    tiny: "Sequence[TinySweep]", device: str | None, data_dir: Path | None, *, quiet: bool
) -> "list[RunRecord]":
    from sandmask.paper.quick import run_tiny
    from sandmask.training import choose_device

    progress = Progress(quiet=quiet)
    runs = run_tiny(tiny, choose_device(device), data_dir, progress)
    progress.close()
    return runs
