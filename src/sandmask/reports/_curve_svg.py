"""The accuracies of one run by step, as a small SVG picture for notebooks."""

import html

import numpy as np
from numpy.typing import NDArray

from sandmask.records import RunRecord
from sandmask.reports.html._curves import kept_points
from sandmask.selection import mean_over_environments

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 170, 42, 10, 24, 22  # of the picture, and its margins
POINTS = 200  # of a curve
COLORS = ("#1f77b4", "#d95f02")


def curves_svg(run: RunRecord) -> str:
    """Return the picture: validation accuracy, and the accuracy on held-out environments; "" without an evaluation.

    :param run: record of the run.
    """
    if not len(run.steps):
        return ""
    kept = kept_points(len(run.steps), (), POINTS)
    held_out = ", ".join(run.env_names[env] for env in run.spec.test_envs)
    curves = {
        "validation": (run.accuracy_out, run.train_envs),
        f"held out: {held_out}": (run.accuracy_in, run.spec.test_envs),
    }
    shown = {name: mean_over_environments(table[kept][:, envs]) for name, (table, envs) in curves.items() if envs}
    last = int(run.steps[-1])
    x = LEFT + (WIDTH - LEFT - RIGHT) * run.steps[kept] / max(last, 1)
    parts = [_axes(last)]
    for place, (name, color) in enumerate(zip(shown, COLORS, strict=False)):
        parts += [
            _line(x, shown[name], color),
            _text(LEFT + 170 * place, TOP - 10, f"{name} {shown[name][-1]:.1%}", color),
        ]
    label = html.escape(f"Accuracy by step: {', '.join(f'{name} {y[-1]:.1%}' for name, y in shown.items())}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )


def _height(accuracy: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - accuracy)


def _axes(last: int) -> str:
    lines = "".join(
        f'<path d="M{LEFT} {_height(y):.1f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".25"/>'
        + _text(LEFT - 6, _height(y) + 4, f"{y:.0%}", anchor="end")
        for y in (0.0, 0.5, 1.0)
    )
    return lines + _text(LEFT, HEIGHT - 6, "0") + _text(WIDTH - RIGHT, HEIGHT - 6, f"step {last}", anchor="end")


def _line(x: NDArray[np.float64], accuracy: NDArray[np.float64], color: str) -> str:
    points = " ".join(f"{at:.1f},{_height(y):.1f}" for at, y in zip(x, accuracy, strict=True))
    end = f'<circle cx="{x[-1]:.1f}" cy="{_height(accuracy[-1]):.1f}" r="2.5" fill="{color}"/>'
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>{end}'


def _text(x: float, y: float, text: str, color: str = "currentColor", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{html.escape(text)}</text>'
