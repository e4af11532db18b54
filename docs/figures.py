"""The pictures of docs/masks.md, computed by the masks and by their equations.

    python docs/figures.py            # into docs/images/

Each is a function that returns a figure; `FIGURES` names the files.
"""  # noqa: INP001

import argparse
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sandmask._drawing import FAINT, LOOKS, new_figure, style
from sandmask.masks import ANDMask, Mask, SANDMask

AND, SAND, RELEASED, ERM = (LOOKS[name].color for name in ("ANDMask", "SANDMask", "SANDMask-released", "ERM"))
ENVIRONMENTS = (2, 3, 5, 16)


def agreements(environments: int) -> list[tuple[float, float]]:
    """Every agreement that E signs can have, and how likely it is if they are tossed: A = |E - 2k| / E."""
    chances: dict[float, float] = {}
    for minus in range(environments + 1):
        agreement = abs(environments - 2 * minus) / environments
        chances[agreement] = chances.get(agreement, 0.0) + comb(environments, minus) / 2**environments
    return sorted(chances.items())


def draw_agreement() -> Figure:
    """What agreements there are, and which of them are common by chance alone."""
    figure = new_figure(8, 2.3)
    for axes, environments in zip(figure.subplots(1, len(ENVIRONMENTS), sharey=True), ENVIRONMENTS, strict=True):
        values, chances = zip(*agreements(environments), strict=True)
        axes.bar(values, chances, width=0.045, color=AND)
        axes.set(title=f"{environments} environments", xlim=(-0.06, 1.06), xticks=(0, 0.5, 1), xlabel="agreement A")
    figure.axes[0].set_ylabel("share, signs at random")
    return figure


def formula(agreement: Tensor, tau: float, dispersion: float) -> Tensor:
    """Equation 2 of the paper."""
    return ((agreement - tau) / dispersion).tanh().clamp(min=0)


def draw_weights() -> Figure:
    """The weight of an element as a function of its agreement."""
    figure = new_figure(8, 3.0)
    left, middle, right = figure.subplots(1, 3, sharey=True)
    agreement, tau = torch.linspace(0, 1, 401), 0.4
    left.plot(agreement, (agreement >= tau).float(), color=AND)
    left.set_title(r"AND: $m = 1\,[\,A \geq \tau\,]$")
    for dispersion, line in ((0.05, "-"), (0.5, "--"), (2.0, ":")):
        middle.plot(agreement, formula(agreement, tau, dispersion), line, color=SAND, label=f"$s^2$ = {dispersion:g}")
    middle.set_title(r"SAND, printed: $\max(0, \tanh\dfrac{A - \tau}{s^2})$")
    for scale, line in ((1e-4, "-"), (1.0, "--"), (5.0, ":")):
        weights = formula(agreement, tau, scale**2 / 10)  # the deviation of the gradients is `scale`, the gain 10
        right.plot(agreement, weights, line, color=RELEASED, label=rf"$\sigma$ = {scale:g}")
    right.set_title(r"SAND, released: $\max(0, \tanh\dfrac{k (A - \tau)}{\mathrm{var}})$")
    for axes in (left, middle, right):
        axes.axvline(tau, color=FAINT, linewidth=0.8)
        axes.text(tau - 0.02, 0.93, r"$\tau$", color=FAINT, ha="right")
        axes.set(xlabel="agreement A", ylim=(-0.04, 1.06))
    middle.legend(loc="center left")
    right.legend(loc="upper right", bbox_to_anchor=(1.02, 0.75))
    left.set_ylabel("weight m")
    return figure


def plane(mask: Mask, size: int = 241) -> Tensor:
    """The weight for every pair (g_1, g_2) of two environments' gradients in [-2, 2]."""
    side = torch.linspace(-2, 2, size)
    first, second = torch.meshgrid(side, side, indexing="xy")
    return mask.weights(torch.stack([first, second]))


def draw_two_environments() -> Figure:
    """All that can happen to an element with two environments."""
    panels: dict[str, Mask] = {
        r"AND, $\tau$ = 0.6": ANDMask(tau=0.6),
        r"SAND, $\tau$ = 0.6": SANDMask(tau=0.6),
        r"SAND, $\tau$ = 0": SANDMask(tau=0.0),
        r"SAND, $\tau$ = -0.5": SANDMask(tau=-0.5),
    }
    figure = new_figure(8, 2.5)
    image: Any = None
    for axes, (title, mask) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        image = axes.imshow(plane(mask).numpy(), extent=(-2, 2, -2, 2), origin="lower", vmin=0, vmax=1, cmap="cividis")
        axes.set(title=title, xlabel="$g_1$", xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    figure.axes[0].set_ylabel("$g_2$")
    figure.colorbar(image, ax=figure.axes, label="weight m", shrink=0.85)
    return figure


# Two environments agree on y, and pull x to -1 and to 1.
CENTRES, STEEPNESS = (-1.0, 1.0), (1.0, 3.0)
MASKS: dict[str, tuple[Mask, str]] = {
    "plain gradient": (ANDMask(tau=0.0), ERM),
    r"AND, $\tau$ = 1": (ANDMask(tau=1.0), AND),
    r"SAND, $\tau$ = 0": (SANDMask(tau=0.0), SAND),
}


def bowls(position: Tensor) -> Tensor:
    """Gradients [2, 2] of the two environments' losses, a (x - c_e)^2 / 2 + y^2 / 2, at (x, y)."""
    x, y = position
    return torch.stack([torch.stack([a * (x - c), y]) for a, c in zip(STEEPNESS, CENTRES, strict=True)])


def descent(mask: Mask, start: tuple[float, float], steps: int = 400, lr: float = 0.02) -> Tensor:
    """The way [steps + 1, 2] of gradient descent, without momentum."""
    way = [torch.tensor(start)]
    for _ in range(steps):
        way.append(way[-1] - lr * mask(bowls(way[-1])))
    return torch.stack(way)


def draw_dead_zone() -> Figure:
    """Two bowls with different centres: where the environments' signs differ, a mask stops."""
    figure = new_figure(8, 2.8)
    side = torch.linspace(-2.6, 2.6, 120)
    x, y = torch.meshgrid(side, side, indexing="xy")
    loss = sum(a * (x - c) ** 2 / 2 for a, c in zip(STEEPNESS, CENTRES, strict=True)) / 2 + y**2 / 2
    for axes, (title, (mask, color)) in zip(figure.subplots(1, 3, sharey=True), MASKS.items(), strict=True):
        axes.contour(x, y, loss, levels=9, colors=FAINT, linewidths=0.5)
        if mask is not MASKS["plain gradient"][0]:
            axes.axvspan(*CENTRES, color="#dddddd", linewidth=0)
            axes.text(0, -2.4, "x is masked", ha="center", color="#555555", fontsize=8)
        for start in ((-2.3, 2.2), (2.3, 1.4), (-0.4, 2.3)):
            way = descent(mask, start)
            axes.plot(*way.T, color=color)
            axes.plot(*way[-1], "o", color=color, markersize=5)
        axes.scatter(CENTRES, (0, 0), marker="x", color="#555555", zorder=3)
        axes.set(title=title, xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), xlabel="x: the environments pull to -1 and 1")
    figure.axes[0].set_ylabel("y: both pull to 0")
    return figure


def draw_density() -> Figure:
    """How much an AND-mask lets through by chance alone, and what the rescale makes of it."""
    figure = new_figure(8, 2.8)
    left, right = figure.subplots(1, 2)
    counts = list(range(2, 17))
    for tau, line in ((0.3, ":"), (0.6, "--"), (1.0, "-")):
        passing = [sum(chance for value, chance in agreements(e) if value >= tau) for e in counts]
        left.semilogy(counts, passing, line, color=AND, marker=".", label=rf"$\tau$ = {tau:g}")
        right.semilogy(
            counts, [1 / share for share in passing], line, color=AND, marker=".", label=rf"$\tau$ = {tau:g}"
        )
    left.set(xlabel="environments", ylabel="share that passes")
    right.set(xlabel="environments", ylabel="factor on what passes")
    left.set_title("AND-mask on signs at random")
    right.set_title('rescale="sparsity": divided by that share')
    left.legend()
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "masks-agreement.svg": draw_agreement,
    "masks-weights.svg": draw_weights,
    "masks-two-environments.svg": draw_two_environments,
    "masks-dead-zone.svg": draw_dead_zone,
    "masks-density.svg": draw_density,
}


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        with style():
            draw().savefig(folder / f"{name}.writing", format="svg", metadata={"Date": None})
        (folder / f"{name}.writing").replace(folder / name)


if __name__ == "__main__":
    main()
