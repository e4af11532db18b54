"""One look for every figure: fonts, sizes, and a colour and a marker for each method."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandmask.errors import SandmaskError

if TYPE_CHECKING:
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
