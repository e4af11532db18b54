"""The panels of Figure 1: surfaces, arrows, streams, dead zones, and where descents end."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sandmask.paper._landscape import ENDS, REACH, Masking, gradients, grid, losses
from sandmask.paper._style import DEAD, LANDSCAPE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SURFACE, _ARROWS, _STREAM, _ZONE = 161, 19, 61, 321  # points a side
_EXTENT = (-REACH, REACH, -REACH, REACH)
END_COLORS = {"shared": "#0072B2", "spurious": "#D55E00", "stopped": "#bdbdbd", "elsewhere": "#F0E442"}
END_WORDS = {
    "shared": "the shared minimum",
    "spurious": "the minimum of A alone",
    "stopped": "stopped in a dead zone",
    "elsewhere": "elsewhere, still moving",
}
_MINIMA = {"shared": (1.0, 1.0), "spurious": (-1.0, -1.0)}


def _frame(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[], yticks=[], aspect="equal")
    for side in axes.spines.values():
        side.set_visible(True)


def surface(axes: "Axes", values: Tensor, title: str, *, faint: bool = False) -> None:
    """A loss as a heat map with level lines."""
    numbers = values.numpy()
    axes.imshow(
        numbers, origin="lower", extent=_EXTENT, cmap=LANDSCAPE, alpha=0.45 if faint else 1.0, interpolation="bilinear"
    )
    axis = np.linspace(-REACH, REACH, len(numbers))
    axes.contour(axis, axis, numbers, levels=9, colors="white", linewidths=0.5, alpha=0.7, linestyles="solid")
    _frame(axes, title)


def _dead(axes: "Axes", masking: Masking) -> None:
    """Hatch what gets no update at all."""
    update = masking.update(gradients(grid(_ZONE)))
    zone = (update == 0).all(-1).double().numpy()
    if zone.any():
        axis = np.linspace(-REACH, REACH, _ZONE)
        axes.contourf(axis, axis, zone, levels=[0.5, 1.5], colors=[DEAD], alpha=0.55)
        axes.contourf(axis, axis, zone, levels=[0.5, 1.5], colors="none", hatches=["////"])


def _average(points: int) -> Tensor:
    return losses(grid(points)).mean(0)


def arrows(axes: "Axes", masking: Masking, title: str) -> None:
    """The update's direction and length, on the average loss."""
    surface(axes, _average(_SURFACE), title, faint=True)
    _dead(axes, masking)
    points = grid(_ARROWS)
    down = -masking.update(gradients(points))
    moving = (down != 0).any(-1)
    # Lengths are drawn by their square root, so that the slow ones can be seen beside the fast ones.
    length = down.norm(dim=-1, keepdim=True)
    drawn = torch.where(length > 0, down / length.clamp_min(1e-300).sqrt(), torch.zeros_like(down))
    x, y, u, v = (part[moving].numpy() for part in (points[..., 0], points[..., 1], drawn[..., 0], drawn[..., 1]))
    axes.quiver(x, y, u, v, color="black", scale=22, width=0.006, headwidth=3.6)


def stream(axes: "Axes", masking: Masking, title: str) -> None:
    """The lines that descent follows; they end where there is nothing to follow."""
    surface(axes, _average(_SURFACE), title, faint=True)
    _dead(axes, masking)
    points = grid(_STREAM)
    down = -masking.update(gradients(points)).numpy()
    dead = (down == 0).all(-1)
    axis = points[0, :, 0].numpy()
    u, v = (np.ma.masked_where(dead, down[..., part]) for part in (0, 1))
    axes.streamplot(axis, axis, u, v, color="black", linewidth=0.7, arrowsize=0.7, density=1.15)
    _frame(axes, title)


def ends_map(axes: "Axes", starts: Tensor, kinds: Tensor, title: str) -> None:
    """Every start, in the colour of where descent from it ends."""
    side = int(len(starts) ** 0.5)
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([END_COLORS[name] for name in ENDS])
    axes.imshow(
        kinds.reshape(side, side).numpy(), origin="lower", extent=_EXTENT, cmap=colors, vmin=-0.5, vmax=len(ENDS) - 0.5
    )
    for name, (x, y) in _MINIMA.items():
        axes.plot(x, y, marker="*" if name == "shared" else "o", color="white", markeredgecolor="black", markersize=8)
    _frame(axes, title)


def draw_landscape(erm: Masking, and_mask: Masking, sand: Masking) -> "Figure":
    """The paper's seven panels, and the average's stream in the place that it leaves empty."""
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


def draw_changes(
    maskings: Sequence[Masking], starts: Tensor, kinds: Mapping[tuple[str, float], Tensor], momenta: Sequence[float]
) -> "Figure":
    """A column for each mask: its stream, and where descent ends for each momentum."""
    from matplotlib.patches import Patch

    with style():
        figure = new_figure(1.75 * len(maskings), 1.95 * (1 + len(momenta)) + 0.3)
        axes = figure.subplots(1 + len(momenta), len(maskings))
        for column, masking in enumerate(maskings):
            stream(axes[0, column], masking, masking.label.replace(", ", "\n", 1))
            for row, momentum in enumerate(momenta, 1):
                ends_map(axes[row, column], starts, kinds[masking.name, momentum], "")
        for row, momentum in enumerate(momenta, 1):
            axes[row, 0].set_ylabel(f"ends, momentum {momentum:g}")
        axes[0, 0].set_ylabel("stream")
        handles = [Patch(color=END_COLORS[name], label=END_WORDS[name]) for name in ENDS]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(ENDS))
    return figure
