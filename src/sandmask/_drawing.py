"""The style of our figures: settings of matplotlib, and the colour and marker of each method."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sandmask.errors import SandmaskError

if TYPE_CHECKING:
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
