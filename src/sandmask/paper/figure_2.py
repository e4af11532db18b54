"""Figure 2: failure modes of the AND-mask on Spirals: momentum, noise on the invariant dimensions, initialization."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from sandmask._drawing import FAINT, LOOKS, new_figure, style
from sandmask.datasets.spirals import PUBLISHED, spiral_environment
from sandmask.errors import SandmaskError
from sandmask.paper._product import Product
from sandmask.paper.figure_2_runs import METHODS, MOMENTUM, NOISE, SCALE, TEST_ENV, is_search
from sandmask.records import RunRecord
from sandmask.reports import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TITLE = "Figure 2: failure modes on Spirals"
SOLVED, FAILED = 0.9, 0.6  # test accuracies: a seed solves Spirals from 0.9 on, and fails below 0.6
_CHUNK = 250  # examples at a time, to limit memory
_LEAST_WIDTH = 0.02  # of the Gaussians without noise; well below the distance between the arms


class Panel(NamedTuple):
    """A panel of the figure, which varies one of three values."""

    name: str
    title: str
    label: str
    base: float  # the value in the other panels


PANELS = (
    Panel("momentum", "(a) momentum", "Adam's β₁", MOMENTUM),
    Panel("noise", "(b) noise", "noise on the invariant dimensions", NOISE),
    Panel("init", "(c) initialization", "scale of the first weights", SCALE),
)


def figure_2(runs: Sequence[RunRecord]) -> Product:
    """Make Figure 2 from records."""
    data = results(runs)
    summary = summarize(data)
    grids = (*(_grid(panel, summary) for panel in PANELS), _settings_grid(runs))
    return Product(
        "figure-2",
        TITLE,
        figures={"figure-2": draw(data, summary)},
        data={"figure-2": summary, "figure-2-runs": data},
        grids=grids,
        summary={"means": summary.to_dict("records")},
    )


def results(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """Return a row for each run in each of its panels: panel, value, method, seed, accuracies, status and steps."""
    rows = []
    for run in runs:
        if "adam_beta1" in run.spec.hparams and "noise" in run.spec.options and not is_search(run):
            values = conditions(run)
            rows += [
                {"panel": panel.name, "value": values[panel.name], **_outcome(run)}
                for panel in PANELS
                if all(values[other.name] == other.base for other in PANELS if other != panel)
            ]
    if not rows:
        raise SandmaskError("These records have no runs of Figure 2. Train them with: sandmask paper figure-2")
    return pd.DataFrame(rows)


def conditions(run: RunRecord) -> dict[str, float]:
    """Return momentum, noise and initial scale of a run."""
    hparams, options = run.spec.hparams, run.spec.options
    scale = hparams.get("init_scale", options.get("init_scale", 1.0))  # older records have it as an option
    return {"momentum": hparams["adam_beta1"], "noise": float(options["noise"]), "init": float(scale)}


def _outcome(run: RunRecord) -> dict[str, object]:
    """Return the results of a run at its last checkpoint. Accuracies are NaN if it diverged before the first one."""
    tested, trained = run.accuracy_in[-1:, TEST_ENV], run.accuracy_out[-1:, list(run.train_envs)]
    return {
        "method": run.spec.algorithm,
        "seed": run.spec.seed,
        "test_accuracy": float(tested[0]) if len(tested) else float("nan"),
        "train_accuracy": float(trained.mean()) if len(trained) else float("nan"),
        "status": run.status,
        "steps": run.spec.steps,
    }


def summarize(data: pd.DataFrame) -> pd.DataFrame:
    """Compute over seeds: mean, standard error, minimum, maximum, and the shares of seeds that solved and failed."""
    groups = data.groupby(["panel", "value", "method"], sort=False)["test_accuracy"]
    table = groups.agg(
        seeds="count",
        mean="mean",
        error=lambda values: float(np.std(values) / np.sqrt(len(values))),
        least="min",
        greatest="max",
        solved=lambda values: float((values >= SOLVED).mean()),
        failed=lambda values: float((values < FAILED).mean()),
    )
    return table.reset_index()


def draw(data: pd.DataFrame, summary: pd.DataFrame) -> "Figure":
    """Draw three panels: a dot for every seed, and the mean over seeds with its standard error."""
    with style():
        figure = new_figure(7.4, 3.4)
        all_axes = figure.subplots(1, 3, sharey=True)
        for axes, panel in zip(all_axes, PANELS, strict=True):
            _draw_panel(axes, panel, data, summary)
        all_axes[0].set_ylabel("accuracy on the unseen domain, %")
        handles, labels = all_axes[1].get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda place: labels[place] == "best possible")
        figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside lower center", ncols=3)
    return figure


def _draw_panel(axes: "Axes", panel: Panel, data: pd.DataFrame, summary: pd.DataFrame) -> None:
    mine, means = data[data.panel == panel.name], summary[summary.panel == panel.name]
    values = sorted(mine.value.unique())
    places = {value: place for place, value in enumerate(values)}
    methods = _methods(mine)
    for number, method in enumerate(methods):
        look = LOOKS[method]
        shift = 0.13 * (number - (len(methods) - 1) / 2)
        dots = mine[mine.method == method]
        axes.scatter(dots.value.map(places) + shift, 100 * dots.test_accuracy, s=5, color=look.color, alpha=0.3, lw=0)
        row = means[means.method == method].sort_values("value")
        axes.errorbar(
            row.value.map(places) + shift,
            100 * row["mean"],
            yerr=100 * row.error,
            color=look.color,
            marker=look.marker,
            linestyle=look.line,
            linewidth=1.1,
            markersize=4.5,
            label=look.label,
        )
    if panel.name == "noise":
        best = [100 * noise_ceiling(value) for value in values]
        axes.plot(range(len(values)), best, color=FAINT, linewidth=1.2, linestyle=(0, (1, 1)), label="best possible")
    axes.axhline(50, color=FAINT, linewidth=0.7)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set(xlabel=panel.label, ylim=(38, 102))
    axes.set_title(panel.title, loc="left")


def _methods(data: pd.DataFrame) -> list[str]:
    return [method for method in METHODS if method in set(data.method)]


def _grid(panel: Panel, summary: pd.DataFrame) -> Grid:
    mine = summary[summary.panel == panel.name]
    values = sorted(mine.value.unique())
    words = {(row["method"], row["value"]): _words(row) for row in mine.to_dict("records")}
    rows = [(LOOKS[name].label, *(words.get((name, value), "-") for value in values)) for name in _methods(mine)]
    if panel.name == "noise":
        rows.append(("best possible", *(f"{100 * noise_ceiling(value):.1f}" for value in values)))
    note = (
        f"Mean ± standard error over seeds, in percent; in brackets, of {mine.seeds.max()} seeds, how many exceed "
        f"{SOLVED:.0%} and how many stay below {FAILED:.0%}."
    )
    return Grid(f"{TITLE}, {panel.title}", (panel.label, *(f"{v:g}" for v in values)), tuple(rows), (note,))


def _words(row: Mapping[Any, Any]) -> str:
    solved, failed = (round(row[name] * row["seeds"]) for name in ("solved", "failed"))
    return f"{100 * row['mean']:.1f} ± {100 * row['error']:.1f} ({solved}, {failed})"


def _settings_grid(runs: Sequence[RunRecord]) -> Grid:
    """Make a table of each method's hyperparameters, and the number of draws from which they were selected."""
    rows = []
    for method in METHODS:
        mine = [run.spec for run in runs if run.spec.algorithm == method and not is_search(run)]
        draws = {run.spec.hparams_seed for run in runs if run.spec.algorithm == method and is_search(run)}
        if mine:
            chosen = mine[0].hparams
            names = [name for name in ("tau", "k", "lr", "weight_decay") if name in chosen]
            words = ", ".join(f"{name} = {chosen[name]:.3g}" for name in names)
            shapes = f"batch {chosen['batch_size']:g}, width {chosen['mlp_width']:g}, {mine[0].steps} steps"
            rows.append((LOOKS[method].label, words, shapes, str(len(draws))))
    header = ("method", "hyperparameters", "the same for all", "best of so many draws")
    note = "Chosen by accuracy on the test environment, with other seeds than the figure's."
    return Grid(f"{TITLE}, what was chosen", header, tuple(rows), (note,))


def noise_ceiling(noise: float) -> float:
    """Return the best possible accuracy on environment 0: predict the likelier class from the invariant dimensions.

    The density of a class is a mixture of Gaussians, as wide as the noise, around the noiseless examples of the sixteen
    other environments, which are 16,384 draws of the same spiral.
    """
    others = [spiral_environment(e) for e in range(1, PUBLISHED.environments + 1)]
    centres = torch.cat([inputs[:, :2] for inputs, _ in others]).double()
    classes = torch.cat([labels for _, labels in others])
    points, labels = spiral_environment(0, noise)
    width = max(noise, _LEAST_WIDTH)
    right = 0
    for begin in range(0, len(labels), _CHUNK):
        some, truth = points[begin : begin + _CHUNK, :2].double(), labels[begin : begin + _CHUNK]
        log_density = -torch.cdist(some, centres).square() / (2 * width**2)
        scores = torch.stack([log_density[:, classes == label].logsumexp(1) for label in (0, 1)], 1)
        right += int((scores.argmax(1) == truth).sum())
    return right / len(labels)
