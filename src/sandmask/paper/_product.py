"""Products: figures and tables with their data, their common style, and how they are written."""

import base64
import html
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask._files import replacing
from sandmask.errors import SandmaskError
from sandmask.reports import Grid, latex, markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


INK, FAINT, DEAD = "#222222", "#8a8a8a", "#4d4d4d"
LANDSCAPE = "cividis"  # the colour map of surfaces: the same to every eye


@dataclass(frozen=True)
class Look:
    """Colour and marker of a method. The colours are Okabe and Ito's, which suit all kinds of colour vision."""

    label: str
    color: str
    marker: str
    line: str = "-"


LOOKS = {
    "ERM": Look("ERM", "#222222", "o", ":"),
    "IRM": Look("IRM", "#CC79A7", "v", ":"),
    "ANDMask": Look("AND-mask", "#0072B2", "s"),
    "ANDMask-rescaled": Look("AND-mask, rescaled", "#56B4E9", "D", "--"),
    "SANDMask": Look("SAND-mask (paper)", "#D55E00", "^"),
    "SANDMask-rescaled": Look("SAND-mask (paper), rescaled", "#E69F00", "P", "--"),
    "SANDMask-released": Look("SAND-mask (released)", "#009E73", "X", "-."),
}
_SETTINGS: Any = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "pdf.fonttype": 42,  # letters stay letters in a PDF
    "svg.hashsalt": "sandmask",
    "figure.constrained_layout.use": True,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw within this; matplotlib's own settings are put back afterwards."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SandmaskError("Figures need matplotlib. Install it with: pip install 'sandmask[report]'") from error
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure; sizes in inches, 7 being the width of a page of two columns."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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
