"""Figure 3: the shape of the SAND-mask for several dispersions, and its limit, the AND-mask.

A second panel shows the weights that gradients can reach, because agreement limits the dispersion. With agreement A < 1
among E non-zero gradients, a share (1 - A) / 2 of them has the other sign. The dispersion is smallest if these are
almost zero and the others are equal: then mean = a (1 + A) / 2 and var = a^2 (1 - A^2) / 4 * E / (E - 1). So
s2 > (1 - A) / (1 + A) * E / (E - 1), and the curves of small dispersions have no points left of A = 1.
"""

from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from sandmask._drawing import INK, new_figure, style
from sandmask.masks import and_weights, sand_weights
from sandmask.paper._product import Product
from sandmask.reports import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "Figure 3: the shape of the mask"
TAU = 0.9
DISPERSIONS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
REACHED_TAUS = (0.0, 0.25, 0.5, 0.75, 0.9)
ENVIRONMENTS = 16  # training environments of Spirals


def figure_3(*, quick: bool = False) -> Product:
    """Make Figure 3. `quick` computes fewer points; all of them take only seconds."""
    data = shapes(201 if quick else 2001)
    full = torch.ones(1, dtype=torch.float64)
    return Product(
        name="figure-3",
        title=TITLE,
        figures={"figure-3": draw(data)},
        data={"figure-3": data},
        grids=(_numbers(),),
        summary={
            "tau": TAU,
            "weight_at_full_agreement": {f"{s2:g}": float(mask_shape(full, s2, TAU)) for s2 in DISPERSIONS},
        },
    )


def shapes(points: int) -> pd.DataFrame:
    """Compute the curves: kind ("dispersion", "and", "reachable"), tau, dispersion, agreement and mask."""
    axis = torch.linspace(0, 1, points, dtype=torch.float64)
    rows = [_curve("dispersion", TAU, axis, mask_shape(axis, s2, TAU), s2) for s2 in DISPERSIONS]
    rows.append(_curve("and", TAU, axis, and_shape(axis, TAU), 0.0))
    steps = agreements(ENVIRONMENTS)
    for tau in REACHED_TAUS:
        least = least_dispersion(steps, ENVIRONMENTS)
        rows.append(_curve("reachable", tau, steps, mask_shape(steps, least, tau), least))
    return pd.concat(rows, ignore_index=True)


def _curve(kind: str, tau: float, agreement: Tensor, mask: Tensor, dispersion: Tensor | float) -> pd.DataFrame:
    spread = dispersion.numpy() if isinstance(dispersion, Tensor) else dispersion
    columns = {"agreement": agreement.numpy(), "mask": mask.numpy()}
    return pd.DataFrame({"kind": kind, "tau": tau, "dispersion": spread, **columns})


def mask_shape(agreement: Tensor, dispersion: Tensor | float, tau: float) -> Tensor:
    """Compute equation 2 at agreements A and dispersions s2 = var / mean^2 with our SAND-mask."""
    mean = torch.ones_like(agreement)
    return sand_weights(2 * agreement, mean, dispersion * mean, 2, tau)


def and_shape(agreement: Tensor, tau: float) -> Tensor:
    """Compute the AND-mask at these agreements."""
    return and_weights(2 * agreement, 2, tau)


def least_dispersion(agreement: Tensor, environments: int) -> Tensor:
    """Return the lower bound of s2 for `environments` non-zero gradients with this agreement."""
    return (1 - agreement) / (1 + agreement) * environments / (environments - 1)


def agreements(environments: int) -> Tensor:
    """Return the agreements that `environments` non-zero gradients can have."""
    return torch.arange(environments % 2, environments + 1, 2, dtype=torch.float64) / environments


def draw(data: pd.DataFrame) -> "Figure":
    """Draw the paper's panel, and ours beside it."""
    with style():
        figure = new_figure(7.0, 2.9)
        left, right = figure.subplots(1, 2)
        _draw_printed(left, data)
        _draw_reachable(right, data)
    return figure


def _draw_printed(axes: "Axes", data: pd.DataFrame) -> None:
    from matplotlib import colormaps

    colors = colormaps["viridis"]
    for number, s2 in enumerate(DISPERSIONS):
        curve = data[(data.kind == "dispersion") & (data.dispersion == s2)]
        axes.plot(curve.agreement, curve["mask"], color=colors(0.9 * number / (len(DISPERSIONS) - 1)), label=f"{s2:g}")
    limit = data[data.kind == "and"]
    axes.plot(limit.agreement, limit["mask"], color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="AND-mask")
    axes.set(xlim=(0.8, 1.0), ylim=(-0.03, 1.06), ylabel="weight m", xlabel="agreement A of signs")
    axes.set_xticks([0.8, 0.85, 0.9, 0.95, 1.0])
    axes.set_title(f"(a) as in the paper: τ = {TAU:g}", loc="left")
    axes.legend(title="dispersion σ²", loc="upper left")


def _draw_reachable(axes: "Axes", data: pd.DataFrame) -> None:
    from matplotlib import colormaps

    colors = colormaps["plasma"]
    for number, tau in enumerate(REACHED_TAUS):
        curve = data[(data.kind == "reachable") & (data.tau == tau)]
        color = colors(0.85 * number / (len(REACHED_TAUS) - 1))
        axes.plot(curve.agreement, curve["mask"], marker="o", markersize=3.5, color=color, label=f"{tau:g}")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.03, 1.06), ylabel="largest weight m", xlabel="agreement A of signs")
    axes.set_title(f"(b) what {ENVIRONMENTS} gradients can reach", loc="left")
    axes.legend(title="τ", loc="upper left")


def _numbers() -> Grid:
    """Make a table of the agreements at which the mask of Figure 3 reaches 0.5 and 0.9."""
    axis = torch.linspace(TAU, 1, 100_001, dtype=torch.float64)
    rows = []
    for s2 in DISPERSIONS:
        mask = mask_shape(axis, s2, TAU)
        passed = [axis[mask >= level] for level in (0.5, 0.9)]
        words = [f"{float(where[0]):.4f}" if len(where) else "never" for where in passed]
        top = float(mask_shape(torch.ones(1, dtype=torch.float64), s2, TAU))
        reach = (1 - s2 * (ENVIRONMENTS - 1) / ENVIRONMENTS) / (1 + s2 * (ENVIRONMENTS - 1) / ENVIRONMENTS)
        rows.append((f"{s2:g}", f"{top:.3f}", *words, f"{reach:.4f}"))
    header = ("dispersion", "m at full agreement", "A where m = 0.5", "A where m = 0.9", "smallest A that can have it")
    note = (
        f"τ = {TAU:g}. Last column: {ENVIRONMENTS} non-zero gradients with a lower agreement have a larger dispersion."
    )
    return Grid(TITLE, header, tuple(rows), (note,))
