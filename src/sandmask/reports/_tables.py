"""From trials to cells, from cells to tables, and which cell of a column is the best."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sandmask.reports._data import Cell, Parts, Table, Trial
from sandmask.reports._trials import Expected
from sandmask.reports.statistics import bootstrap_interval, mean_and_error
from sandmask.selection import Selected, algorithm_of, is_soup

ENVIRONMENTS = "environments"
# The order of methods in DomainBed's tables, which papers follow; the masks come last there.
_CUSTOMARY = (
    *(
        "ERM",
        "IRM",
        "GroupDRO",
        "Mixup",
        "MLDG",
        "CORAL",
        "MMD",
        "DANN",
        "CDANN",
        "MTL",
        "SagNet",
        "ARM",
        "VREx",
        "RSC",
    ),
    *("ANDMask", "SANDMask"),
)
Trials = Mapping[tuple[str, str], Sequence[Trial]]  # by method and environment
Value = Callable[[Selected], float | None]  # what a table shows of a selected checkpoint


def method_order(methods: Sequence[str]) -> tuple[str, ...]:
    """The customary order, then the alphabet; soups and ensembles, which are of many runs, come last."""
    places = {name: place for place, name in enumerate(_CUSTOMARY)}
    return tuple(sorted(methods, key=lambda name: (is_soup(name), places.get(algorithm_of(name), len(places)), name)))


def is_of(method: str, name: str) -> bool:
    """Whether a method goes by this name: its own, or its algorithm's."""
    return name in (method, algorithm_of(method))


def _cell(trials: Sequence[Trial], accuracies: Sequence[float]) -> Cell:
    """A cell over trials, from the accuracies to average: its mean is None when there are none."""
    mean, error = mean_and_error(accuracies) if accuracies else (None, None)
    if len(accuracies) == 1:
        error = None  # one trial says nothing about its spread; DomainBed prints 0.0 there
    interval = bootstrap_interval(accuracies)
    expected = sum(trial.expected for trial in trials)
    return Cell(
        mean=mean,
        error=error,
        interval=None if interval is None else (100 * interval[0], 100 * interval[1]),
        values=tuple(100 * value for value in accuracies),
        trials=tuple(trials),
        have=expected - sum(len(trial.gaps) for trial in trials),
        expected=expected,
        diverged=sum(len(trial.diverged) for trial in trials),
    )


def value_cell(trials: Sequence[Trial], values: Sequence[float]) -> Cell:
    """A cell of a metric; without any value, it is as if nothing had been run."""
    return _cell(trials, values) if values else Cell(mean=None)


def trial_cell(trials: Sequence[Trial], value: Value | None = None) -> Cell:
    """A cell of a dataset's table: mean and error over the trials that have a value, by default their accuracy."""
    selected = [trial.selected for trial in trials if trial.selected is not None]
    if value is None:
        return _cell(trials, [one.test_accuracy for one in selected])
    return value_cell(trials, [number for one in selected if (number := value(one)) is not None])


def column_mean(cells: Sequence[Cell], kind: str) -> Cell:
    """The plain average of a row over all of its columns."""
    return _mean_of(cells, len(cells), kind)


def _mean_of(cells: Sequence[Cell], of: int, kind: str) -> Cell:
    """The plain average of a row, without an error, as the paper and DomainBed print it: over what there is.

    :param of: how many columns of this `kind` a complete average is over.
    """
    means = [cell.mean for cell in cells if cell.mean is not None]
    in_part = any(cell.parts is not None and not cell.parts.complete for cell in cells if cell.mean is not None)
    return Cell(
        mean=sum(means) / len(means) if means else None,
        have=sum(cell.have for cell in cells),
        expected=sum(cell.expected for cell in cells),
        diverged=sum(cell.diverged for cell in cells),
        parts=Parts(len(means), of, kind, in_part),
    )


def dataset_table(
    dataset: str, expected: Expected, trials: Trials, chance: float | None = None, value: Value | None = None
) -> Table:
    """One dataset: methods by held-out environments. Environments that no run holds out have no column."""
    methods = method_order(list({method for method, _ in trials}))
    tried = held_out(expected.environments, trials)
    absent = [name for name in expected.reported if name not in tried]
    cells = {(method, column): trial_cell(trials[method, column], value) for method in methods for column in tried}
    return Table(
        title=dataset,
        methods=methods,
        columns=tuple(tried),
        cells=cells,
        averages={
            method: _mean_of([cells[method, column] for column in tried], len(tried) + len(absent), ENVIRONMENTS)
            for method in methods
        },
        notes=(f"No run holds out {', '.join(absent)} alone.",) if absent else (),
        chances={} if chance is None else dict.fromkeys(tried, chance),
    )


def held_out(environments: Sequence[str], trials: Trials) -> list[str]:
    """The environments that some run holds out, in the dataset's order: the columns of its table."""
    return [
        name for name in environments if any(_tried(found) for (_, column), found in trials.items() if column == name)
    ]


def _tried(trials: Sequence[Trial]) -> bool:
    return any(len(trial.gaps) < trial.expected or any(gap.why for gap in trial.gaps) for trial in trials)


def dataset_average(trials: Sequence[Sequence[Trial]], of: int) -> Cell:
    """A cell of the averages table: each trial's mean over environments, then mean and error over trials.

    `trials` holds the trials of each environment, of which a complete table has `of`. Where some trial lacks an
    environment, the number is the mean over those that it has, without an error.
    """
    everything = [trial for environment in trials for trial in environment]
    if not everything:
        return Cell(mean=None)  # a dataset that the method was not trained on
    if any(trial.selected is None for trial in everything):
        cells = [trial_cell(environment) for environment in trials]
        return replace(_mean_of(cells, of, ENVIRONMENTS), trials=tuple(everything))
    accuracies = [
        float(np.mean([trial.selected.test_accuracy for trial in same_trial if trial.selected is not None]))
        for same_trial in zip(*trials, strict=True)
    ]
    return replace(_cell(everything, accuracies), parts=Parts(len(trials), of, ENVIRONMENTS))


def averages_table(
    expected: Mapping[str, Expected], trials: Mapping[str, Trials], chances: Mapping[str, float]
) -> Table:
    """All datasets: methods by datasets."""
    methods = method_order(list({method for found in trials.values() for method, _ in found}))
    cells = {}
    for dataset, found in trials.items():
        tried = held_out(expected[dataset].environments, found)
        of = len({*tried, *expected[dataset].reported})
        for method in methods:
            rows = [found[method, environment] for environment in tried if (method, environment) in found]
            cells[method, dataset] = dataset_average(rows, of)
    return Table(
        title="Averages",
        methods=methods,
        columns=tuple(trials),
        cells=cells,
        averages={
            method: _mean_of([cells[method, dataset] for dataset in trials], len(trials), "datasets")
            for method in methods
        },
        chances={dataset: chance for dataset, chance in chances.items() if dataset in trials},
    )


BEST_NOTE = (
    "Bold: the highest number of a column, if it is above chance and no other number of the column rounds to the same."
)


def best_cells(table: Table) -> set[tuple[str, str | None]]:
    """The (method, column) of each column's best cell; None is the column of averages."""
    found: set[tuple[str | None, str | None]] = set()
    lowest = table.lower_is_better
    for column in table.columns:
        cells = {method: table.cells[method, column] for method in table.methods}
        best = best_method(cells, table.chances.get(column), lowest=lowest)
        found.add((best, column))
    known = [table.chances[column] for column in table.columns if column in table.chances]
    chance = sum(known) / len(known) if known and len(known) == len(table.columns) else None
    found.add((best_method(table.averages, chance, lowest=lowest), None))
    return {(method, column) for method, column in found if method is not None}


def best_method(cells: Mapping[str, Cell], chance: float | None, *, lowest: bool = False) -> str | None:
    """The method with the highest (or `lowest`) mean of a column; None for ties as printed, and up to chance.

    Averages compete with those over as many columns: over others, they do not compare. A single number is not a best.
    """
    means = {method: cell.mean for method, cell in cells.items() if cell.mean is not None and math.isfinite(cell.mean)}
    widest = max((_columns(cells[method]) for method in means), default=0)
    shown = {method: round(mean, 1) for method, mean in means.items() if _columns(cells[method]) == widest}
    if len(shown) < 2:
        return None
    best = min(shown.values()) if lowest else max(shown.values())
    first, *others = [method for method, mean in shown.items() if mean == best]
    is_above_chance = chance is None or best > round(chance, 1)
    return first if is_above_chance and not others else None


def _columns(cell: Cell) -> int:
    return cell.parts.found if cell.parts is not None else 1
