"""Products: figures and tables with their data, and how they are written."""

import base64
import html
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask._replacing import replacing
from sandmask.paper._style import style
from sandmask.reports import Grid, latex, markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Report = Callable[[str, int, int], None]  # what is being done, how much of it is, of how much


def silent(what: str, done: int, total: int) -> None:
    """A no-op progress callback."""


@dataclass(frozen=True)
class Product:
    """A remade figure or table. Names are file names without an ending."""

    name: str
    title: str
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    data: Mapping[str, "pd.DataFrame"] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)  # the few numbers that a script would ask for

    def _repr_html_(self) -> str:
        """What a notebook shows: the title, the figures and the tables."""
        pictures = "".join(f'<img alt="{html.escape(name)}" src="{_data_url(f)}">' for name, f in self.figures.items())
        return f"<h3>{html.escape(self.title)}</h3>{pictures}<pre>{html.escape(self.words())}</pre>"

    def words(self) -> str:
        """The tables in Markdown."""
        return markdown(self.grids)


def _data_url(figure: "Figure") -> str:
    """A figure as PNG inside an address."""
    stream = io.BytesIO()
    with style():
        figure.savefig(stream, format="png", dpi=100)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def write_product(product: Product, out: Path) -> list[Path]:
    """Write figures as PNG and PDF, tables as Markdown and LaTeX, data as CSV; the files' paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with style():
        for name, figure in product.figures.items():
            # Without the date, the same figure is the same file.
            png: Any = {"format": "png", "dpi": 160, "metadata": {"Software": None}}
            pdf: Any = {"format": "pdf", "metadata": {"CreationDate": None}}
            written.append(_whole(out / f"{name}.png", partial(figure.savefig, **png)))
            written.append(_whole(out / f"{name}.pdf", partial(figure.savefig, **pdf)))
    for name, frame in product.data.items():
        written.append(_whole(out / f"{name}.csv", partial(frame.to_csv, index=False)))
    if product.grids:
        for kind, words in (("md", product.words()), ("tex", latex(product.grids))):
            written.append(_whole(out / f"{product.name}.{kind}", partial(_write_text, text=words)))
    return written


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _whole(path: Path, save: Callable[[Path], object]) -> Path:
    """A file that is there whole or not at all."""
    with replacing(path) as temporary:
        save(temporary)
    return path
