"""A reproduced figure or table of the paper with its data, shown in notebooks and written to files."""

import base64
import html
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask._drawing import style
from sandmask._files import replacing
from sandmask.reports import Grid, latex, markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OnProgress = Callable[[str, int, int], None]  # receives the current task, the work done and the total work


@dataclass(frozen=True)
class Product:
    """A reproduced figure or table. Names are file names without an extension."""

    name: str
    title: str
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    data: Mapping[str, "pd.DataFrame"] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)  # the main numbers, for `--json`

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the title, the figures and the tables."""
        pictures = "".join(f'<img alt="{html.escape(name)}" src="{_data_url(f)}">' for name, f in self.figures.items())
        return f"<h3>{html.escape(self.title)}</h3>{pictures}<pre>{html.escape(self.words())}</pre>"

    def words(self) -> str:
        """Return the tables in Markdown."""
        return markdown(self.grids)


def _data_url(figure: "Figure") -> str:
    """Encode a figure as a PNG file inside a URL."""
    stream = io.BytesIO()
    with style():
        figure.savefig(stream, format="png", dpi=100)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def write_product(product: Product, out: Path) -> list[Path]:
    """Write figures as PNG and PDF, tables as Markdown and LaTeX, and data as CSV. Return the paths of the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []

    def write(name: str, save: Callable[..., object], **options: Any) -> None:
        with replacing(out / name) as temporary:
            save(temporary, **options)
        written.append(out / name)

    with style():
        for name, figure in product.figures.items():
            # Without version and date, equal figures give equal files.
            write(f"{name}.png", figure.savefig, format="png", dpi=160, metadata={"Software": None})
            write(f"{name}.pdf", figure.savefig, format="pdf", metadata={"CreationDate": None})
    for name, frame in product.data.items():
        write(f"{name}.csv", frame.to_csv, index=False)
    if product.grids:
        write(f"{product.name}.md", Path.write_text, data=product.words(), encoding="utf-8")
        write(f"{product.name}.tex", Path.write_text, data=latex(product.grids), encoding="utf-8")
    return written
