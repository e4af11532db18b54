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
from sandmask.reports._data import Cell, Confusion, MetricReport, Table, Trial
from sandmask.reports._tables import Trials, column_mean, dataset_table, held_out, method_order, value_cell
from sandmask.reports._trials import Expected
from sandmask.selection import Selected

PER_CLASS, CONFUSION = "per-class", "confusion"


def shown_measures(runs: Sequence[RunRecord], asked: Sequence[str] | None) -> tuple[str, ...]:
    """The metrics to report: those asked for, or the recorded ones that are a number for each environment.

    One that is asked for by name and that no run recorded is an error.
    """
    if asked is None:
        return tuple(name for name in recorded_measures(runs) if not MEASURES[name].is_table)
    wanted, found = parse_measures(asked), reportable(runs)
    if "all" not in asked and (missing := [name for name in wanted if name not in found]):
        raise SandmaskError(f"No run recorded {' and '.join(missing)}. Train with --metrics {','.join(missing)}.")
    return tuple(name for name in wanted if name in found)


def reportable(runs: Sequence[RunRecord]) -> set[str]:
    """The metrics that there can be tables of."""
    found = set(recorded_measures(runs))
    return found | {PER_CLASS} if CONFUSION in found else found


def metric_reports(
    names: Sequence[str], expected: Mapping[str, Expected], trials: Mapping[str, Trials]
) -> tuple[MetricReport, ...]:
    """A table for each dataset of each metric that is a number, and of accuracy on each class."""
    found = []
    for name in names:
        if name == CONFUSION:
            continue
        make = _class_table if name == PER_CLASS else lambda d, e, t, name=name: _number_table(name, d, e, t)
        tables = {dataset: make(dataset, expected[dataset], trials[dataset]) for dataset in trials}
        present = {dataset: table for dataset, table in tables.items() if table is not None}
        if present:
            found.append(MetricReport(name, MEASURES[name].title, MEASURES[name].description, present))
    return tuple(found)


def _number_table(name: str, dataset: str, expected: Expected, trials: Trials) -> Table | None:
    def value(selected: Selected) -> float | None:
        values = measured(selected.run, name, "in")
        return None if values is None else float(values[selected.index, selected.test_env])

    table = dataset_table(dataset, expected, trials, value=value)
    if all(cell.mean is None for cell in table.cells.values()):
        return None
    return replace(table, lower_is_better=MEASURES[name].lower_is_better)


def _class_table(dataset: str, expected: Expected, trials: Trials) -> Table | None:
    """Methods by classes. A trial's accuracy on a class is the mean over the held-out environments that have it."""
    columns = held_out(expected.environments, trials)
    methods = method_order(list({method for method, _ in trials}))
    classes = _classes(trials)
    cells: dict[tuple[str, str], Cell] = {}
    for method in methods:
        same_trial = list(zip(*(trials[method, column] for column in columns), strict=True))
        recalls = [_mean_recalls(found) for found in same_trial]
        everything = [trial for found in same_trial for trial in found]
        for number, name in enumerate(classes):
            values = [float(one[number]) for one in recalls if one is not None and np.isfinite(one[number])]
            cells[method, name] = value_cell(everything, values)
    if all(cell.mean is None for cell in cells.values()):
        return None
    averages = {method: column_mean([cells[method, name] for name in classes], "classes") for method in methods}
    return Table(dataset, methods, classes, cells, averages)


def _classes(trials: Trials) -> tuple[str, ...]:
    selected = (trial.selected for found in trials.values() for trial in found)
    return max((one.run.classes for one in selected if one is not None), key=len, default=())


def _mean_recalls(trials: Sequence[Trial]) -> NDArray[np.float64] | None:
    """The accuracy on each class, mean over environments; NaN for a class that none of them has."""
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


def confusions(names: Sequence[str], trials: Mapping[str, Trials]) -> tuple[Confusion, ...]:
    """The confusion matrix of each method on each dataset, summed over held-out environments and trials."""
    if CONFUSION not in names:
        return ()
    found = []
    for dataset, tables in trials.items():
        for method in method_order(list({method for method, _ in tables})):
            total: NDArray[np.int64] | None = None
            selected = [t.selected for (name, _), some in tables.items() if name == method for t in some if t.selected]
            for one in selected:
                counts = confusion_counts(one.run)
                if counts is not None:
                    here = counts[one.index, 0, one.test_env]
                    total = here if total is None else total + here
            if total is not None:
                found.append(Confusion(dataset, method, _classes(tables), tuple(map(tuple, total.tolist()))))
    return tuple(found)
