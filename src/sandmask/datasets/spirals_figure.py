"""Draw the predictions of networks over the plane of Spirals' two invariant dimensions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sandmask._replacing import replacing
from sandmask.datasets._base import Dataset

REACH, POINTS = 2.3, 220  # the plane from -2.3 to 2.3 in both directions


class SpiralPanel(NamedTuple):
    """One method's panel: its name, the probability of class 1 over the plane, accuracy on the held-out domain."""

    title: str
    probability: NDArray[np.float32]  # [POINTS, POINTS]
    accuracy: float


@torch.no_grad()
def spiral_panel(title: str, predict: Callable[[Tensor], Tensor], n_inputs: int, accuracy: float) -> SpiralPanel:
    """The network's answer for every point of the plane, all shortcut dimensions at their mean, zero.

    :param predict: a function from inputs [n, n_inputs] to probabilities [n, 2].
    """
    axis = torch.linspace(-REACH, REACH, POINTS)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    plane = torch.zeros(POINTS * POINTS, n_inputs)
    plane[:, 0], plane[:, 1] = x.flatten(), y.flatten()
    probability = predict(plane)[:, 1]
    return SpiralPanel(title, probability.cpu().numpy().reshape(POINTS, POINTS), accuracy)


def draw_spirals(panels: Sequence[SpiralPanel], dataset: Dataset, path: Path) -> None:
    """Panels side by side, with some examples of the domain that has no shortcut (environment 0)."""
    from matplotlib.figure import Figure

    examples = torch.arange(dataset.bounds[0], min(dataset.bounds[0] + 600, dataset.bounds[1]))
    points, labels = dataset.inputs(examples).cpu().numpy(), dataset.labels[examples].cpu().numpy()
    figure = Figure(figsize=(4 * len(panels), 4.4), layout="constrained")
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        extent = (-REACH, REACH, -REACH, REACH)
        axes.imshow(panel.probability, origin="lower", extent=extent, cmap="RdBu_r", vmin=0, vmax=1, alpha=0.75)
        for label, color in ((0, "#1b4f8a"), (1, "#a4222c")):
            mine = points[labels == label]
            axes.scatter(mine[:, 0], mine[:, 1], s=6, color=color, edgecolors="white", linewidths=0.2)
        axes.set_title(f"{panel.title}\n{panel.accuracy:.0%} on the unseen domain", fontsize=13)
        axes.set(xticks=[], yticks=[], xlim=(-REACH, REACH), ylim=(-REACH, REACH))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=110, bbox_inches="tight")
