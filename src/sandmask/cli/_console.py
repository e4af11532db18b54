"""Printing: tables for people, JSON for scripts."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sandmask._text import printable

if TYPE_CHECKING:
    import pandas as pd

STANDARD_OUTPUT = Path("-")  # instead of the name of a file
PIPE_WIDTH = 160  # of a table that is written to a file or a pipe


def styled(text: str, **style: Any) -> str:
    """Style text, unless NO_COLOR is set. `typer.echo` removes styles if it writes to a file."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **style)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that is as wide as the terminal allows."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title), style="table.title") if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if is_known else PIPE_WIDTH).print(table)


def plain_rows(frame: "pd.DataFrame") -> list[dict[Any, Any]]:
    """The rows of a frame, with None for missing values."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def print_json(value: object) -> None:
    """Print indented JSON. Numbers keep every bit."""
    typer.echo(json.dumps(value, indent=2))
