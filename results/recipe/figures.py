"""Draw the pictures of the page "Masks that work" from the records beside this file.

python results/recipe/figures.py                draws recipe-maps.png, recipe-environments.png and recipe-mechanism.png
python results/recipe/figures.py --digits DIR   draws recipe-watermarks.png; DIR/mnist/*.gz
"""

import argparse
import runpy
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from sandmask.datasets.spirals import SpiralParameters
from sandmask.records import RunRecord, RunSpec, read_runs

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
TITLES = {"ANDMask-rescaled": "AND-mask", "SANDMask-rescaled": "SAND-mask", "ERM": "ERM"}
COLORS = {"spiral": "#2a78b5", "signature": "#d1495b"}


def runs(name: str) -> list[RunRecord]:
    """The records of a map."""
    return read_runs(HERE / "maps" / f"{name}.records.parquet")


def settings(spec: RunSpec) -> Mapping[str, float]:
    """A run's hyperparameters and the parameters of its data."""
    options = dict(part.split("=") for part in spec.dataset.split(":")[1:])
    data = SpiralParameters.parse(options)
    return {**spec.hparams, "environments": data.environments, "signature": data.signature}


def held_out(run: RunRecord) -> float:
    """Accuracy on the held-out environment after the last step."""
    return float(run.accuracy_in[-1, run.spec.test_envs[0]])


def without_luck(run: RunRecord) -> float:
    """The same, but no better than on environment 0, whose signatures are random.

    A network that uses signatures is right on a held-out environment whose signature happens to resemble one that it
    has seen, and near 50% on environment 0.
    """
    return min(held_out(run), float(run.accuracy_in[-1, 0]))


def heat(
    axes: Axes,
    found: list[RunRecord],
    algorithm: str,
    x: str,
    y: str,
    accuracy: Callable[[RunRecord], float] = held_out,
) -> None:
    """Accuracy in percent, a mean over held-out environments and seeds."""
    cells = defaultdict(list)
    for run in found:
        if run.spec.algorithm == algorithm:
            own = settings(run.spec)
            cells[own[y], own[x]].append(accuracy(run))
    rows, columns = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    values = 100 * np.array([[np.mean(cells.get((row, column), [np.nan])) for column in columns] for row in rows])
    axes.imshow(values, cmap="RdYlBu", vmin=0, vmax=100, aspect="auto", origin="lower")
    for i, j in zip(*np.nonzero(np.isfinite(values)), strict=True):
        dark = values[i, j] > 85 or values[i, j] < 15
        axes.text(j, i, f"{values[i, j]:.0f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(
        range(len(columns)), [f"{value:.2g}" if value < 100 else f"{value:g}" for value in columns], fontsize=7
    )
    axes.set_yticks(range(len(rows)), [f"{value:.1g}" if value < 1 else f"{value:g}" for value in rows], fontsize=7)
    axes.set_title(TITLES[algorithm], fontsize=10)
    axes.set_xlabel(x.replace("_", " "), fontsize=8)
    axes.set_ylabel(y.replace("_", " "), fontsize=8)


def draw_maps() -> None:
    """Weight decay x learning rate, batch size x tau."""
    figure, grid = plt.subplots(2, 3, figsize=(10.5, 6.2), layout="constrained")
    decay, batch = runs("decay-rate-1001"), runs("batch-tau")
    for axes, algorithm in zip(grid[0], TITLES, strict=True):
        heat(axes, decay, algorithm, "lr", "weight_decay")
        axes.set_xlabel("learning rate", fontsize=8)
    for axes, algorithm in zip(grid[1, :2], TITLES, strict=False):
        heat(axes, batch, algorithm, "tau", "batch_size")
    grid[1, 2].axis("off")  # ERM has no tau
    figure.savefig(IMAGES / "recipe-maps.png", dpi=110)


def draw_environments() -> None:
    """Number of environments with a signature x dimension of the signatures."""
    figure, grid = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    found = runs("environments-signature")
    for axes, algorithm in zip(grid, ("ERM", "ANDMask-rescaled", "SANDMask-rescaled"), strict=True):
        heat(axes, found, algorithm, "signature", "environments", without_luck)
        axes.set_xlabel("dimension of the signatures", fontsize=8)
        axes.set_ylabel("training environments", fontsize=8)
    figure.savefig(IMAGES / "recipe-environments.png", dpi=110)


def draw_mechanism() -> None:
    """First-layer weights over training, with weight decay in Adam's gradient and without."""
    table = pd.read_csv(HERE / "mechanism.csv")
    shown = {
        "L2 3e-4": "Adam, weight decay 3e-4",
        "L2 1e-6": "Adam, weight decay 1e-6",
        "none": "Adam, no decay",
        "AdamW 0.1": "AdamW, weight decay 0.1",
    }
    figure, grid = plt.subplots(2, len(shown), figsize=(13, 4.6), layout="constrained", sharex=True, sharey="row")
    for column, (variant, title) in enumerate(shown.items()):
        own = table[table.variant == variant]
        for weights, color in COLORS.items():
            for _, run in own[own.weights == weights].groupby("held_out"):
                grid[0, column].plot(run.step, run.rms, color=color, alpha=0.8, lw=1.2)
        for _, run in own[own.weights == "spiral"].groupby("held_out"):
            grid[1, column].plot(run.step, 100 * run.held_out_accuracy, color="#333333", alpha=0.8, lw=1.2)
        grid[0, column].set_title(title, fontsize=10)
        grid[0, column].set_yscale("log")
        grid[1, column].axhline(50, color="#aaaaaa", lw=0.8, ls=":")
        grid[1, column].set_xlabel("step", fontsize=9)
    grid[0, 0].set_ylabel("RMS of first-layer weights", fontsize=9)
    grid[1, 0].set_ylabel("accuracy held out, %", fontsize=9)
    names = {"spiral": "two inputs of the spiral", "signature": "sixteen inputs of the signature"}
    lines = [plt.Line2D([], [], color=color, label=names[weights]) for weights, color in COLORS.items()]
    grid[0, 2].legend(handles=lines, fontsize=8, loc="center")
    figure.savefig(IMAGES / "recipe-mechanism.png", dpi=110)


def draw_watermarks(data_dir: Path) -> None:
    """Two digits of each label in three domains."""
    dataset = runpy.run_path(str(HERE.parents[1] / "examples" / "plugins" / "watermarks.py"))["load"](17, data_dir)
    figure, grid = plt.subplots(1, 3, figsize=(10, 1.9), layout="constrained")
    for domain, axes in enumerate(grid):
        first, end = dataset.bounds[domain], dataset.bounds[domain + 1]
        of_label = [first + (dataset.labels[first:end] == label).nonzero()[:2, 0] for label in (0, 1)]
        strip = np.concatenate([dataset.stored[i, 0] for indices in of_label for i in indices], axis=1)
        axes.imshow(strip, cmap="gray")
        axes.set_title(f"domain {domain}", fontsize=10)
        axes.set_xticks([13.5, 41.5], ["5 to 9", "0 to 4"])
        axes.tick_params(length=0)
        axes.set_yticks([])
    figure.savefig(IMAGES / "recipe-watermarks.png", dpi=110)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--digits", type=Path)
    digits = arguments.parse_args().digits
    if digits is not None:
        draw_watermarks(digits)
    else:
        draw_maps()
        draw_environments()
        draw_mechanism()
