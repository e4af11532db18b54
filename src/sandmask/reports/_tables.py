"""From trials to cells, and from cells to tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sandmask.printed import AVERAGE, algorithms, environments, printed, printed_cells
from sandmask.reports._data import Cell, Parts, Table, Trial
from sandmask.reports._trials import Expected
from sandmask.reports.statistics import bootstrap_interval, mean_and_error
from sandmask.selection import algorithm_of

ENVIRONMENTS = "environments"
Trials = Mapping[tuple[str, str], Sequence[Trial]]  # by method and environment


def method_order(methods: Sequence[str]) -> tuple[str, ...]:
    """The paper's order, then the alphabet."""
    places = {name: place for place, name in enumerate(algorithms())}
    return tuple(sorted(methods, key=lambda name: (places.get(algorithm_of(name), len(places)), name)))


def printed_name(method: str) -> str:
    """The name under which the paper has a method's numbers; it has none of averaged weights, `ERM + SMA`."""
    algorithm = algorithm_of(method)
    return method if method.startswith(f"{algorithm} + ") else algorithm


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


def trial_cell(trials: Sequence[Trial]) -> Cell:
    """A cell of a dataset's table: mean and error over the trials that have a value."""
    return _cell(trials, [trial.selected.test_accuracy for trial in trials if trial.selected is not None])


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


def dataset_table(dataset: str, expected: Expected, trials: Trials, chance: float | None = None) -> Table:
    """One dataset: methods by held-out environments. Environments that no run holds out have no column."""
    methods = method_order(list({method for method, _ in trials}))
    tried = held_out(expected.environments, trials)
    absent = [name for name in expected.reported if name not in tried]
    cells = {(method, column): trial_cell(trials[method, column]) for method in methods for column in tried}
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


def beside_paper(table: Table, rule: str, dataset: str | None) -> Table:
    """The same table with the paper's number in every cell that has one; `dataset` is None for averages."""

    def cell_of(method: str, column: str) -> Cell:
        cell, name = table.cells[method, column], printed_name(method)
        if cell.parts is not None and not cell.parts.complete:
            return cell  # over fewer environments than the paper's
        paper = printed(rule, column, name) if dataset is None else printed(rule, dataset, name, column)
        return replace(cell, paper=paper)

    def average_of(method: str) -> Cell:
        cell = table.averages[method]
        if set(table.columns) != set(_paper_columns(dataset)) or not (cell.parts and cell.parts.complete):
            return cell
        source = None if dataset is None else "appendix"
        return replace(cell, paper=printed(rule, dataset or AVERAGE, printed_name(method), table=source))

    return replace(
        table,
        cells={(method, column): cell_of(method, column) for method, column in table.cells},
        averages={method: average_of(method) for method in table.methods},
    )


def _paper_columns(dataset: str | None) -> tuple[str, ...]:
    """The columns that the paper's average is over: it leaves Spirals out of the average of datasets."""
    if dataset is not None:
        return environments(dataset)
    names = dict.fromkeys(cell.dataset for cell in printed_cells() if cell.table == "1")
    return tuple(name for name in names if name != AVERAGE)
