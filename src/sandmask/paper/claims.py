"""Tables for the paper's claims that the records can test."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pandas as pd

from sandmask._drawing import LOOKS
from sandmask.errors import SandmaskError
from sandmask.paper._compare import RULES, Compared, compare
from sandmask.paper._printed import AVERAGE
from sandmask.paper._product import Product
from sandmask.paper.figure_2 import noise_ceiling, results, summarize
from sandmask.paper.figure_2_runs import METHODS
from sandmask.paper.tables import as_protocol, is_untrained
from sandmask.records import RunRecord
from sandmask.reports import Grid
from sandmask.reports.statistics import paired_comparison

CHANCE = 0.5


def claims(runs: Sequence[RunRecord]) -> list[Product]:
    """Make a table for each claim that these records can test."""
    made: dict[str, Grid | None] = {}
    with suppress(SandmaskError):  # raised if there are no runs of Figure 2
        data = results(runs)
        made |= {name: make(data) for name, make in FIGURE_2_CLAIMS.items()}
    made |= {name: make(runs) for name, make in TABLE_CLAIMS.items()}
    products = [Product(name, grid.title, grids=(grid,)) for name, grid in made.items() if grid and grid.rows]
    if not products:
        raise SandmaskError(
            "These records cannot test the claims: they have no runs of Figure 2, Spirals or ColoredMNIST."
        )
    return products


def momentum(data: pd.DataFrame) -> Grid:
    """ "Heavy reliance on momentum": accuracy with and without it, seed by seed."""
    mine = data[data.panel == "momentum"]
    low, high = mine.value.min(), 0.9
    rows = []
    for method in METHODS:
        table = mine[mine.method == method].pivot_table(index="seed", columns="value", values="test_accuracy")
        if low not in table or high not in table:
            continue
        pairs = table[[low, high]].dropna()
        test = paired_comparison((100 * pairs[high]).tolist(), (100 * pairs[low]).tolist())
        interval = "-" if test.interval is None else f"{test.interval[0]:+.1f} to {test.interval[1]:+.1f}"
        means = (f"{100 * pairs[value].mean():.1f}" for value in (low, high))
        rows.append((LOOKS[method].label, *means, f"{test.difference:+.1f}", interval, f"{test.p_value:.3g}"))
    header = ("method", f"β₁ = {low:g}", f"β₁ = {high:g}", "gain", "95% interval", "p")
    note = "Accuracy on the unseen environment in percent, paired by seed."
    return Grid("Reliance on momentum", header, tuple(rows), (note,))


def noise(data: pd.DataFrame) -> Grid:
    """ "Highly sensitive to noisy data": accuracy, and the share of the best possible gain over chance."""
    table = summarize(data)
    mine = table[table.panel == "noise"]
    values = sorted(mine.value.unique())
    best = {value: noise_ceiling(value) for value in values}
    rows = [("best possible", *(f"{100 * best[value]:.1f}" for value in values))]
    for method in METHODS:
        means = mine[mine.method == method].set_index("value")["mean"]
        if len(means) == len(values):
            shares = {value: (means[value] - CHANCE) / (best[value] - CHANCE) for value in values}
            words = (f"{100 * means[value]:.1f} ({100 * shares[value]:.0f}%)" for value in values)
            rows.append((LOOKS[method].label, *words))
    note = "Accuracy in percent; in brackets, the share of the best possible classifier's gain over chance."
    return Grid("Sensitivity to noise", ("noise", *(f"{value:g}" for value in values)), tuple(rows), (note,))


def initialization(data: pd.DataFrame) -> Grid:
    """ "Convergence is highly dependent on initialization": the spread over seeds."""
    mine = data[(data.panel == "init") & (data.value == 1.0)]
    rows = []
    for method in METHODS:
        accuracy = 100 * mine[mine.method == method].test_accuracy
        if len(accuracy):
            spread = (accuracy.std(ddof=0), accuracy.min(), accuracy.median(), accuracy.max())
            rows.append((LOOKS[method].label, str(len(accuracy)), *(f"{value:.1f}" for value in spread)))
    header = ("method", "seeds", "standard deviation", "least", "median", "greatest")
    note = "Accuracy on the unseen environment, in percent."
    return Grid("Dependence on the initialization", header, tuple(rows), (note,))


def _gains(runs: Sequence[RunRecord], dataset: str, title: str, pairs: Sequence[tuple[str, str]]) -> Grid | None:
    """Make a table of differences between the averages of two methods, beside the printed differences."""
    mine = as_protocol(runs, dataset)
    if not mine:
        return None
    rows = [row for one, other in pairs for row in _gain_rows(mine, dataset, one, other)]
    notes = ["Differences of averages in percentage points, over the draws that both methods have."]
    if any("runs)" in row[2] for row in rows):
        notes.append("Where runs are missing, over the trials that have every environment.")
    return Grid(title, ("difference", "selection", "ours", "paper"), tuple(rows), tuple(notes))


def _gain_rows(runs: Sequence[RunRecord], dataset: str, one: str, other: str) -> list[tuple[str, str, str, str]]:
    """Return a row for each rule. Both methods get the same draws, because more draws are an advantage."""
    one_draws, other_draws = (
        {run.spec.hparams_seed for run in runs if run.spec.algorithm == name} for name in (one, other)
    )
    both = [
        run for run in runs if run.spec.algorithm in (one, other) and run.spec.hparams_seed in one_draws & other_draws
    ]
    if not both:
        return []
    found = compare(both, [dataset], RULES, draws=20, trials=3)
    cells = {(cell.rule, cell.method): cell for cell in found if cell.environment == AVERAGE}
    return [
        (f"{one} - {other}", rule, *_gain(cells[rule, one], cells[rule, other]))
        for rule in RULES
        if (rule, one) in cells and (rule, other) in cells
    ]


def _gain(one: Compared, other: Compared) -> tuple[str, str]:
    ours = "-"
    if one.ours.mean is not None and other.ours.mean is not None:
        ours = f"{one.ours.mean - other.ours.mean:+.1f}"
        if one.ours.error is not None and other.ours.error is not None:
            ours += f" ± {math.hypot(one.ours.error, other.ours.error):.1f}"
        if not (one.ours.complete and other.ours.complete):
            ours += f" ({one.ours.have + other.ours.have}/{one.ours.expected + other.ours.expected} runs)"
    if one.paper is None or other.paper is None:
        return ours, "-"
    return ours, f"{one.paper.mean - other.paper.mean:+.1f}"


def replicates(runs: Sequence[RunRecord]) -> Grid | None:
    """ "Replicates the AND-mask": both masks on Spirals, where the AND-mask works."""
    pairs = [
        ("SANDMask", "ANDMask"),
        ("SANDMask-released", "ANDMask-rescaled"),
        ("ANDMask", "ERM"),
        ("SANDMask", "ERM"),
    ]
    return _gains(runs, "Spirals", "SAND-mask and AND-mask on Spirals", pairs)


def colored_mnist(runs: Sequence[RunRecord]) -> Grid | None:
    """ "Significantly enhances the accuracy over Colored MNIST": with all runs, and without untrained networks."""
    pairs = [(one, other) for one in ("SANDMask", "SANDMask-released") for other in ("ERM", "IRM", "ANDMask")]
    every = _gains(runs, "ColoredMNIST", "Gains on ColoredMNIST", pairs)
    trained = [run for run in runs if not is_untrained(run)]
    if every is None or len(trained) == len(runs):
        return every
    fewer = _gains(trained, "ColoredMNIST", "Gains on ColoredMNIST", pairs)
    rows = [(row[0].replace(" - ", ", τ < 1 - ", 1), *row[1:]) for row in fewer.rows] if fewer is not None else []
    note = "τ < 1: without the default draw of the SAND-mask, whose τ = 1 lets no gradient through."
    return replace(every, rows=(*every.rows, *rows), notes=(*every.notes, note))


FIGURE_2_CLAIMS: dict[str, Callable[[pd.DataFrame], Grid]] = {
    "claim-momentum": momentum,
    "claim-noise": noise,
    "claim-initialization": initialization,
}
TABLE_CLAIMS: dict[str, Callable[[Sequence[RunRecord]], Grid | None]] = {
    "claim-replicates": replicates,
    "claim-colored-mnist": colored_mnist,
}
