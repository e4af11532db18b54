"""Tables of metrics beyond accuracy, on the held-out environments, at the checkpoints that a rule selected."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sandmask.errors import SandmaskError
from sandmask.records import (
    MEASURES,
    RunRecord,
    class_counts,
    confusion_counts,
    measured,
    parse_measures,
    recorded_measures,
)
from sandmask.records._measures import CONFUSION, PER_CLASS
from sandmask.reports._data import Cell, Confusion, Gap, MetricReport, Table, Trial
from sandmask.reports._tables import row_means, selections, value_cell


def shown_measures(runs: Sequence[RunRecord], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the metrics to report: the requested ones, or the recorded ones that are a number for each environment.

    If no run recorded a metric that was requested by name, an error is raised.
    """
    if asked is None:
        return tuple(name for name in recorded_measures(runs) if not MEASURES[name].is_table)
    wanted, found = parse_measures(asked), reportable(runs)
    if "all" not in asked and (missing := [name for name in wanted if name not in found]):
        raise SandmaskError(f"No run recorded {' and '.join(missing)}. Train with --metrics {','.join(missing)}.")
    return tuple(name for name in wanted if name in found)


def reportable(runs: Sequence[RunRecord]) -> set[str]:
    """Return the metrics for which tables can be made."""
    found = set(recorded_measures(runs))
    return found | {PER_CLASS} if CONFUSION in found else found


def metric_reports(names: Sequence[str], tables: Mapping[str, Table]) -> tuple[MetricReport, ...]:
    """Make tables of the metrics that are a number and of per-class accuracy, one for each dataset.

    `tables` are the tables of accuracy, which contain the selected checkpoints.
    """
    reports = []
    for name in names:
        if name == CONFUSION:
            continue
        found = {}
        for dataset, table in tables.items():
            made = _class_table(table) if name == PER_CLASS else _number_table(name, table)
            if any(cell.mean is not None for cell in made.cells.values()):
                found[dataset] = made
        if found:
            reports.append(MetricReport(name, MEASURES[name].title, MEASURES[name].description, found))
    return tuple(reports)


def _number_table(name: str, table: Table) -> Table:
    trials = {key: _recorded(name, cell.trials) for key, cell in table.cells.items()}
    cells = {key: _metric_cell(found, _values(name, found)) for key, found in trials.items()}
    of = max((average.parts.of for average in table.averages.values() if average.parts is not None), default=0)
    averages = row_means(table.methods, table.columns, cells, of, "environments")
    lower_is_better = MEASURES[name].lower_is_better
    return replace(table, cells=cells, averages=averages, chances={}, lower_is_better=lower_is_better)


def _recorded(name: str, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the trials. A selected run that did not record the metric counts as missing."""
    return tuple(trial if _has_recorded(name, trial) else _without(name, trial) for trial in trials)


def _has_recorded(name: str, trial: Trial) -> bool:
    if trial.selected is None:
        return True
    run = trial.selected.run
    return (class_counts(run) if name == PER_CLASS else measured(run, name, "in")) is not None


def _without(name: str, trial: Trial) -> Trial:
    assert trial.selected is not None
    gap = Gap(trial.trial_seed, trial.selected.run.spec.hparams_seed, f"without {name}")
    return replace(trial, selected=None, gaps=(*trial.gaps, gap))


def _metric_cell(trials: Sequence[Trial], values: Sequence[float]) -> Cell:
    """Make the cell of a metric. Without values, it is shown as if there were no runs."""
    return value_cell(trials, values) if values else Cell(mean=None)


def _values(name: str, trials: Sequence[Trial]) -> list[float]:
    """Return the metric on the held-out environment at the selected checkpoints."""
    found = []
    for selected in (trial.selected for trial in trials if trial.selected is not None):
        values = measured(selected.run, name, "in")
        if values is not None:
            found.append(float(values[selected.index, selected.test_env]))
    return found


def _class_table(table: Table) -> Table:
    """Make a table of methods by classes. A trial's accuracy is the mean over held-out environments with the class."""
    classes = _classes(table)
    cells: dict[tuple[str, str], Cell] = {}
    for method in table.methods:
        rows = [_recorded(PER_CLASS, table.cells[method, column].trials) for column in table.columns]
        same_trial = list(zip(*rows, strict=True))
        recalls = [_mean_recalls(found) for found in same_trial]
        everything = [trial for found in same_trial for trial in found]
        for number, name in enumerate(classes):
            values = [float(one[number]) for one in recalls if one is not None and np.isfinite(one[number])]
            cells[method, name] = _metric_cell(everything, values)
    averages = row_means(table.methods, classes, cells, len(classes), "classes")
    return Table(table.title, table.methods, classes, cells, averages)


def _classes(table: Table) -> tuple[str, ...]:
    selected = (one for method in table.methods for one in selections(table, method).values())
    return max((one.run.classes for one in selected), key=len, default=())


def _mean_recalls(trials: Sequence[Trial]) -> NDArray[np.float64] | None:
    """Return the mean accuracy on each class over environments; NaN for a class that none of them has."""
    rows = []
    for selected in (trial.selected for trial in trials if trial.selected is not None):
        counts = class_counts(selected.run)
        if counts is not None:
            right, of = np.moveaxis(counts[selected.index, 0, selected.test_env], -1, 0)
            rows.append(np.where(of > 0, right / np.maximum(of, 1), np.nan))
    if not rows:
        return None
    present = np.isfinite(rows)
    total = np.where(present, rows, 0.0).sum(0)
    return np.where(present.any(0), total / np.maximum(present.sum(0), 1), np.nan)


def confusions(names: Sequence[str], tables: Mapping[str, Table]) -> tuple[Confusion, ...]:
    """Sum the confusion matrices of each method on each dataset over held-out environments and trials."""
    if CONFUSION not in names:
        return ()
    found = []
    for dataset, table in tables.items():
        for method in table.methods:
            counts = [
                of_run[selected.index, 0, selected.test_env]
                for selected in selections(table, method).values()
                if (of_run := confusion_counts(selected.run)) is not None
            ]
            if counts:
                total = np.sum(counts, axis=0).tolist()
                found.append(Confusion(dataset, method, _classes(table), tuple(map(tuple, total))))
    return tuple(found)
