"""A product: a figure or table of the paper, made again, with its data; the style of our figures."""

import base64
import html
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sandmask._files import replacing
from sandmask.errors import SandmaskError
from sandmask.reports import Grid, latex, markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#8a8a8a"


class Look(NamedTuple):
    """Label, colour, marker and line of a method."""

    label: str
    color: str
    marker: str
    line: str = "-"


# The colours of Okabe and Ito, which suit all kinds of colour vision.
LOOKS = {
    "ERM": Look("ERM", "#222222", "o", ":"),
    "ANDMask": Look("AND-mask", "#0072B2", "s"),
    "ANDMask-rescaled": Look("AND-mask, rescaled", "#56B4E9", "D", "--"),
    "SANDMask": Look("SAND-mask (paper)", "#D55E00", "^"),
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
    "pdf.fonttype": 42,  # text stays text in a PDF
    "svg.hashsalt": "sandmask",
    "figure.constrained_layout.use": True,
}


@contextmanager
def style() -> Iterator[None]:
    """Use our settings of matplotlib within this context."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SandmaskError("Figures need matplotlib. Install it with: pip install 'sandmask[report]'") from error
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure; the sizes are in inches, and a page of two columns is 7 wide."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


OnProgress = Callable[[str, int, int], None]  # receives the current task, the work done and the total work


def silent(task: str, done: int, total: int) -> None:
    """A no-op progress callback."""


@dataclass(frozen=True)
class Product:
    """A figure or table, made again. Names are file names without an ending."""

    name: str
    title: str
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    data: Mapping[str, "pd.DataFrame"] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)  # the main numbers, for `--json`

    def _repr_html_(self) -> str:
        """What a notebook shows: the title, the figures and the tables."""
        pictures = "".join(f'<img alt="{html.escape(name)}" src="{_data_url(f)}">' for name, f in self.figures.items())
        return f"<h3>{html.escape(self.title)}</h3>{pictures}<pre>{html.escape(self.words())}</pre>"

    def words(self) -> str:
        """The tables in Markdown."""
        return markdown(self.grids)


def _data_url(figure: "Figure") -> str:
    """A figure as a PNG file inside a URL."""
    stream = io.BytesIO()
    with style():
        figure.savefig(stream, format="png", dpi=100)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def write_product(product: Product, out: Path) -> list[Path]:
    """Write figures as PNG and PDF, tables as Markdown and LaTeX, data as CSV; return the paths of the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []

    @contextmanager
    def file(name: str) -> Iterator[Path]:
        with replacing(out / name) as temporary:
            yield temporary
        written.append(out / name)

    with style():
        for name, figure in product.figures.items():
            # Without the date, the same figure is the same file.
            png: Any = {"Software": None}
            with file(f"{name}.png") as path:
                figure.savefig(path, format="png", dpi=160, metadata=png)
            pdf: Any = {"CreationDate": None}
            with file(f"{name}.pdf") as path:
                figure.savefig(path, format="pdf", metadata=pdf)
    for name, frame in product.data.items():
        with file(f"{name}.csv") as path:
            frame.to_csv(path, index=False)
    if product.grids:
        for ending, words in (("md", product.words()), ("tex", latex(product.grids))):
            with file(f"{product.name}.{ending}") as path:
                path.write_text(words, encoding="utf-8")
    return written
