"""A page on disk."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandmask._replacing import replacing
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.reports.html._page import render_html


def write_html(
    runs: Sequence[RunRecord], path: str | os.PathLike[str], rules: Sequence[str] | None = None, **settings: Any
) -> Path:
    """Write the page of `render_html`, which explains the arguments. The file appears whole or not at all."""
    target = Path(path)
    if target.is_dir():
        raise SandmaskError(f"{target} is a folder. Name the file to write, such as {target / 'report.html'}.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.touch()  # an unwritable place is told before the work is done
            temporary.write_text(render_html(runs, rules, **settings), encoding="utf-8")
    except OSError as error:
        raise SandmaskError(f"{target} cannot be written: {error.strerror}. Name another place.") from error
    return target
