"""From trials to cells, and from cells to tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sandmask.printed import AVERAGE, algorithms, environments, printed, printed_cells
from sandmask.reports._data import Cell, Table, Trial
from sandmask.reports.statistics import bootstrap_interval, mean_and_error

Trials = Mapping[tuple[str, str], Sequence[Trial]]  # by method and environment


def method_order(methods: Sequence[str]) -> tuple[str, ...]:
    """The paper's order, then the alphabet."""
    places = {name: place for place, name in enumerate(algorithms())}
    return tuple(sorted(methods, key=lambda name: (places.get(algorithm_of(name), len(places)), name)))


def algorithm_of(method: str) -> str:
    """The algorithm of a method's name, which may carry settings: `SANDMask (space=domainbed)`."""
    return method.split(" (", maxsplit=1)[0]


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


def _mean_of(cells: Sequence[Cell]) -> Cell:
    """The plain average of a row, without an error, as the paper and DomainBed print it."""
    if any(not cell.expected for cell in cells):
        return Cell(mean=None)  # a dataset that the method was not meant for
    means = [cell.mean for cell in cells if cell.mean is not None]
    return Cell(
        mean=sum(means) / len(means) if means and len(means) == len(cells) else None,
        have=sum(cell.have for cell in cells),
        expected=sum(cell.expected for cell in cells),
        diverged=sum(cell.diverged for cell in cells),
    )


def dataset_table(dataset: str, columns: Sequence[str], trials: Trials) -> Table:
    """One dataset: methods by held-out environments. Environments that no run holds out have no column."""
    methods = method_order(list({method for method, _ in trials}))
    cells = {key: trial_cell(found) for key, found in trials.items()}
    tried = [column for column in columns if any(_tried(trials[method, column]) for method in methods)]
    absent = [column for column in columns if column not in tried]
    notes = (f"No run holds out {', '.join(absent)} alone.",) if absent else ()
    return Table(
        title=dataset,
        methods=methods,
        columns=tuple(tried),
        cells={(method, column): cells[method, column] for method in methods for column in tried},
        averages={method: _mean_of([cells[method, column] for column in columns]) for method in methods},
        notes=notes,
    )


def _tried(trials: Sequence[Trial]) -> bool:
    return any(len(trial.gaps) < trial.expected or any(gap.why for gap in trial.gaps) for trial in trials)


def dataset_average(trials: Sequence[Sequence[Trial]]) -> Cell:
    """A cell of the averages table: each trial's mean over environments, then mean and error over trials.

    `trials` holds the trials of each environment. A number is given only when every trial has every
    environment, because averages over different environments do not compare.
    """
    everything = [trial for environment in trials for trial in environment]
    if any(trial.selected is None for trial in everything):
        return _cell(everything, [])
    accuracies = [
        float(np.mean([trial.selected.test_accuracy for trial in same_trial if trial.selected is not None]))
        for same_trial in zip(*trials, strict=True)
    ]
    return _cell(everything, accuracies)


def averages_table(columns: Mapping[str, Sequence[str]], trials: Mapping[str, Trials]) -> Table:
    """All datasets: methods by datasets. `columns` are the environments of each dataset."""
    methods = method_order(list({method for found in trials.values() for method, _ in found}))
    cells = {}
    for method in methods:
        for dataset, found in trials.items():
            has_runs = (method, columns[dataset][0]) in found
            rows = [found[method, environment] for environment in columns[dataset]] if has_runs else []
            cells[method, dataset] = dataset_average(rows)
    return Table(
        title="Averages",
        methods=methods,
        columns=tuple(trials),
        cells=cells,
        averages={method: _mean_of([cells[method, dataset] for dataset in trials]) for method in methods},
    )


def beside_paper(table: Table, rule: str, dataset: str | None) -> Table:
    """The same table with the paper's number in every cell that has one; `dataset` is None for averages."""

    def cell_of(method: str, column: str) -> Cell:
        name = algorithm_of(method)
        paper = printed(rule, column, name) if dataset is None else printed(rule, dataset, name, column)
        return replace(table.cells[method, column], paper=paper)

    def average_of(method: str) -> Cell:
        comparable = set(table.columns) == set(_paper_columns(dataset))
        source = None if dataset is None else "appendix"
        paper = printed(rule, dataset or AVERAGE, algorithm_of(method), table=source) if comparable else None
        return replace(table.averages[method], paper=paper)

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
