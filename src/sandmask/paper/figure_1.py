"""Figure 1: dead zones in a landscape of two environments, drawn and counted.

The figure has the paper's panels, and three things that they do not show: the share of the plane without any update,
where descent ends from a grid of starts, and which changes to equation 2 remove the dead zones. With two environments,
equation 2 with tau >= 0 has all dead zones of the AND-mask.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import Tensor

from sandmask._drawing import new_figure, style
from sandmask.paper._landscape import (
    ENDS,
    REACH,
    Masking,
    and_masking,
    classify,
    dead_zones,
    descend,
    gradients,
    grid,
    losses,
    minima,
    sand_masking,
)
from sandmask.paper._product import OnProgress, Product
from sandmask.reports import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "Figure 1: the landscape of two environments"
MOMENTA = (0.0, 0.9)
LEARNING_RATE = 0.05
DRAWN = ("erm", "and-1", "sand-0.5", "sand--0.5", "sand-0-smooth-5", "sand-0.5-smooth-5")
SHOWN = ("erm", "and-1", "sand-0.5")  # in the paper's panels; every tau in [0, 1) has the same dead zones
_SURFACE, _ARROWS, _STREAM, _ZONE = 161, 19, 61, 321  # points along each side
_EXTENT = (-REACH, REACH, -REACH, REACH)
END_LOOKS = {  # the colour and the label of each of `ENDS`, in the same order
    "shared": ("#0072B2", "the shared minimum"),
    "spurious": ("#D55E00", "the minimum of A alone"),
    "stopped": ("#bdbdbd", "stopped in a dead zone"),
    "elsewhere": ("#F0E442", "elsewhere, still moving"),
}


def figure_1(*, quick: bool = False, on_progress: OnProgress = lambda *_: None) -> Product:
    """Make Figure 1: pictures and counts. `quick` takes a quarter of the starts and fewer steps."""
    side, steps, resolution = (20, 1000, 201) if quick else (40, 4000, 801)
    starts = grid(side).reshape(-1, 2)
    kinds = _ends(starts, steps, on_progress)
    data = measure(kinds, resolution)
    by_name = {masking.name: masking for masking in maskings()}
    figures = {
        "figure-1": draw_landscape(*(by_name[name] for name in SHOWN)),
        "figure-1-changes": draw_changes([by_name[name] for name in DRAWN], kinds),
    }
    ends = [
        {"mask": mask, "momentum": momentum, "x": round(float(x), 3), "y": round(float(y), 3), "end": ENDS[int(kind)]}
        for (mask, momentum), found in kinds.items()
        for (x, y), kind in zip(starts, found, strict=True)
    ]
    summary = {row["mask"]: {"dead": row["dead"], "slow": row["slow"]} for row in data.to_dict("records")}
    tables = {"figure-1": data, "figure-1-ends": pd.DataFrame(ends)}
    return Product("figure-1", TITLE, figures, tables, (_grid(data, steps),), {"steps": steps, "dead_zones": summary})


def maskings() -> tuple[Masking, ...]:
    """Return the average, both masks of the paper, and changed masks without dead zones."""
    return (
        and_masking(0.0),
        and_masking(1.0),
        *(sand_masking(tau) for tau in (0.0, 0.5, 0.9)),
        *(sand_masking(tau) for tau in (-0.1, -0.5, -1.0)),
        *(sand_masking(tau, sharpness) for tau, sharpness in ((0.0, 1.0), (0.0, 5.0), (0.5, 5.0))),
    )


def _ends(starts: Tensor, steps: int, on_progress: OnProgress) -> dict[tuple[str, float], Tensor]:
    """Classify the ends of all descents, by mask and momentum."""
    places = minima()
    jobs = [(masking, momentum) for masking in maskings() for momentum in MOMENTA]
    kinds = {}
    for number, (masking, momentum) in enumerate(jobs):
        on_progress(f"{masking.label}, momentum {momentum:g}", number, len(jobs))
        ends = descend(masking, starts, momentum, steps, LEARNING_RATE)
        kinds[masking.name, momentum] = classify(ends, masking, places)
    on_progress("descents", len(jobs), len(jobs))
    return kinds


def measure(kinds: Mapping[tuple[str, float], Tensor], resolution: int) -> pd.DataFrame:
    """Return a row for each mask and momentum: shares of the plane, and the number of starts for each kind of end."""
    rows = []
    for masking in maskings():
        shares = dead_zones(masking, resolution)
        for momentum in MOMENTA:
            found = kinds[masking.name, momentum]
            counts = {name: int((found == number).sum()) for number, name in enumerate(ENDS)}
            row = {"mask": masking.name, "label": masking.label, "as_printed": masking.as_printed, **shares}
            rows.append({**row, "momentum": momentum, "starts": found.numel(), **counts})
    return pd.DataFrame(rows)


def _grid(data: pd.DataFrame, steps: int) -> Grid:
    rows = []
    for masking in maskings():
        still, moved = data[data["mask"] == masking.name].to_dict("records")
        shares = [f"{100 * still[name]:.1f}%" for name in ("dead", "partly_dead", "slow")]
        counts = [f"{still[name]}, {moved[name]}" for name in ENDS]
        name = masking.label.replace("-mask", "").replace("sign → ", "")
        rows.append((name, *shares, *counts))
    header = ("mask", "dead", "partly dead", "slow", "shared", "spurious", "stopped", "elsewhere")
    shares_note = "Shares of the plane: no update; one of two elements is zero; under 1% of the average gradient."
    ends_note = (
        f"Ends of gradient descent from {data.starts.iloc[0]} starts, {steps} steps, learning rate {LEARNING_RATE:g}, "
        "with momentum 0 and 0.9: at the shared minimum, at that of A alone, stopped in a dead zone, or neither."
    )
    return Grid(TITLE, header, tuple(rows), (shares_note, ends_note))


def draw_landscape(erm: Masking, and_mask: Masking, sand: Masking) -> "Figure":
    """Draw the paper's seven panels, and the stream of the average in the empty eighth place."""
    with style():
        figure = new_figure(7.2, 3.9)
        axes = figure.subplots(2, 4)
        a, b = losses(grid(_SURFACE))
        surface(axes[0, 0], a, "(a) Environment A")
        surface(axes[1, 0], b, "(e) Environment B")
        arrows(axes[0, 1], erm, "(b) Average")
        stream(axes[1, 1], erm, "Average (stream)")
        arrows(axes[0, 2], and_mask, "(c) " + and_mask.label)
        stream(axes[1, 2], and_mask, "(f) AND-mask (stream)")
        arrows(axes[0, 3], sand, "(d) " + sand.label)
        stream(axes[1, 3], sand, "(g) SAND-mask (stream)")
    return figure


def draw_changes(maskings: Sequence[Masking], kinds: Mapping[tuple[str, float], Tensor]) -> "Figure":
    """Draw a column for each mask: its stream, and where descent ends for each momentum."""
    from matplotlib.patches import Patch

    with style():
        figure = new_figure(1.75 * len(maskings), 1.95 * (1 + len(MOMENTA)) + 0.3)
        axes = figure.subplots(1 + len(MOMENTA), len(maskings))
        for column, masking in enumerate(maskings):
            stream(axes[0, column], masking, masking.label.replace(", ", "\n", 1))
            for row, momentum in enumerate(MOMENTA, 1):
                ends_map(axes[row, column], kinds[masking.name, momentum])
        for row, momentum in enumerate(MOMENTA, 1):
            axes[row, 0].set_ylabel(f"ends, momentum {momentum:g}")
        axes[0, 0].set_ylabel("stream")
        handles = [Patch(color=color, label=label) for color, label in END_LOOKS.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(ENDS))
    return figure


def arrows(axes: "Axes", masking: Masking, title: str) -> None:
    """Draw the direction and length of the update, on the average loss."""
    _background(axes, masking, title)
    points = grid(_ARROWS)
    down = -masking.update(gradients(points))
    length = down.norm(dim=-1, keepdim=True)
    moving = (length > 0).squeeze(-1)
    drawn = down / length.sqrt()  # as long as the square root of the update, so that slow updates are visible too
    axes.quiver(*points[moving].T, *drawn[moving].T, color="black", scale=22, width=0.006, headwidth=3.6)


def stream(axes: "Axes", masking: Masking, title: str) -> None:
    """Draw the lines that descent follows, which end at the dead zones."""
    _background(axes, masking, title)
    points = grid(_STREAM)
    down = -masking.update(gradients(points)).numpy()
    dead = (down == 0).all(-1)
    axis = points[0, :, 0].numpy()
    u, v = (np.ma.masked_where(dead, down[..., part]) for part in (0, 1))
    axes.streamplot(axis, axis, u, v, color="black", linewidth=0.7, arrowsize=0.7, density=1.15)
    _frame(axes, title)


def _background(axes: "Axes", masking: Masking, title: str) -> None:
    """Draw the average loss, with the dead zones of a mask hatched."""
    surface(axes, losses(grid(_SURFACE)).mean(0), title, faint=True)
    update = masking.update(gradients(grid(_ZONE)))
    zone = (update == 0).all(-1).double().numpy()
    if zone.any():
        axis = np.linspace(-REACH, REACH, _ZONE)
        axes.contourf(axis, axis, zone, levels=[0.5, 1.5], colors=["#4d4d4d"], alpha=0.55)
        axes.contourf(axis, axis, zone, levels=[0.5, 1.5], colors="none", hatches=["////"])


def surface(axes: "Axes", values: Tensor, title: str, *, faint: bool = False) -> None:
    """Draw a loss as a heat map with level lines."""
    numbers = values.numpy()
    axes.imshow(
        numbers, origin="lower", extent=_EXTENT, cmap="cividis", alpha=0.45 if faint else 1.0, interpolation="bilinear"
    )
    axis = np.linspace(-REACH, REACH, len(numbers))
    axes.contour(axis, axis, numbers, levels=9, colors="white", linewidths=0.5, alpha=0.7, linestyles="solid")
    _frame(axes, title)


def ends_map(axes: "Axes", kinds: Tensor) -> None:
    """Draw every start in the colour of the place where descent from it ends."""
    from matplotlib.colors import ListedColormap

    side = int(len(kinds) ** 0.5)
    colors = ListedColormap([color for color, _ in END_LOOKS.values()])
    axes.imshow(
        kinds.reshape(side, side).numpy(), origin="lower", extent=_EXTENT, cmap=colors, vmin=-0.5, vmax=len(ENDS) - 0.5
    )
    for place, marker in ((1.0, "*"), (-1.0, "o")):  # the shared minimum and that of A alone
        axes.plot(place, place, marker=marker, color="white", markeredgecolor="black", markersize=8)
    _frame(axes, "")


def _frame(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[], yticks=[], aspect="equal")
    for side in axes.spines.values():
        side.set_visible(True)
