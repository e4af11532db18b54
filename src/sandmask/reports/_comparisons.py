"""Comparisons with the baseline (paired, and by mean ranks), with earlier runs, and with the paper's numbers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.reports._data import Cell, Change, Comparison, Report, RuleReport, Statistics, Table
from sandmask.reports._tables import is_of, method_order, selections, trial_accuracies
from sandmask.reports.statistics import PairedComparison, critical_difference, mean_ranks, paired_comparison
from sandmask.selection import is_soup, settings_of

ALL = "all"
_Condition = tuple[str, str, int]  # dataset, environment, trial
_ByHand = Mapping[tuple[str, str], Sequence[str]]  # by dataset and method
_Scores = defaultdict[str, dict[_Condition, float]]  # of each method


def compare(tables: Mapping[str, Table], baseline: str) -> Statistics | None:
    """Compare every method with the baseline on each dataset, and on all datasets together if there are several.

    Return None if there is nothing to compare: no baseline among the methods, or no other method.
    """
    methods = method_order({method for table in tables.values() for method in table.methods})
    reference = next((name for name in methods if is_of(name, baseline)), None)
    if reference is None or len(methods) < 2:
        return None
    scopes = {dataset: {dataset: table} for dataset, table in tables.items()}
    if len(tables) > 1:
        scopes[ALL if ALL not in tables else f"{ALL} datasets"] = dict(tables)
    comparisons: list[Comparison] = []
    critical = {}
    for scope, some in scopes.items():
        scores = _scores(some)
        present = [method for method in methods if scores[method]]
        ranks, conditions = _ranks(present, scores, reference)
        if len(ranks) > 1 and conditions > 1:
            critical[scope] = critical_difference(len(ranks), conditions)
        for method in present:
            against = None if method == reference else _paired(scores[method], scores[reference])
            comparisons.append(Comparison(scope, method, ranks.get(method), against))
    return Statistics(reference, tuple(comparisons), critical)


def _paired(values: Mapping[Any, float], others: Mapping[Any, float]) -> PairedComparison | None:
    """Compare the values whose keys both have; None if there are none."""
    pairs = sorted(values.keys() & others.keys())
    return paired_comparison([values[key] for key in pairs], [others[key] for key in pairs]) if pairs else None


def _scores(tables: Mapping[str, Table]) -> _Scores:
    """Return the selected accuracies of each method in percent, by condition."""
    scores: _Scores = defaultdict(dict)
    for dataset, table in tables.items():
        for method in table.methods:
            for (environment, trial), accuracy in trial_accuracies(table, method).items():
                scores[method][dataset, environment, trial] = accuracy
    return scores


def _ranks(methods: Sequence[str], scores: _Scores, reference: str) -> tuple[dict[str, float], int]:
    """Return mean ranks over the baseline's cells (means over trials), and the number of these cells.

    Only methods with a number in all of these cells are ranked. Soups, ensembles and adapted models are not ranked.
    """
    means = {method: _cell_means(scores[method]) for method in methods}
    cells = sorted(means.get(reference, {}))
    ranked = [name for name in methods if cells and means[name].keys() >= set(cells) and not is_soup(name)]
    if len(ranked) < 2:
        return {}, 0
    table = np.array([[means[method][cell] for method in ranked] for cell in cells])
    return dict(zip(ranked, mean_ranks(table).tolist(), strict=True)), len(cells)


def _cell_means(scores: Mapping[_Condition, float]) -> dict[tuple[str, str], float]:
    cells: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for (dataset, environment, _), value in sorted(scores.items()):
        cells[dataset, environment].append(value)
    return {cell: float(np.mean(values)) for cell, values in cells.items()}


def beside_earlier(report: Report, earlier: Report, by_hand: _ByHand) -> Report:
    """Add the numbers of an earlier report, under the same rules, to the cells that both reports have.

    `by_hand` has notes on the hyperparameters in which the runs of a dataset and method differ.
    """
    rules = [_rule(now, then, by_hand) for now, then in zip(report.rules, earlier.rules, strict=True)]
    if not any(rule.changes for rule in rules):
        raise SandmaskError(
            "The two sets of runs have no dataset, method and held-out environment in common, so there is nothing to "
            "compare. Methods are matched by algorithm and settings."
        )
    return replace(report, rules=tuple(rules))


def _rule(now: RuleReport, then: RuleReport, by_hand: _ByHand) -> RuleReport:
    averages = now.averages
    if averages is not None and then.averages is not None:
        averages = _beside(averages, then.averages)
    of_metric = {metric.metric: metric.datasets for metric in then.metrics}
    metrics = [
        replace(metric, datasets=_tables(metric.datasets, of_metric.get(metric.metric, {}))) for metric in now.metrics
    ]
    return replace(
        now,
        datasets=_tables(now.datasets, then.datasets),
        averages=averages,
        metrics=tuple(metrics),
        changes=tuple(_changes(now.datasets, then.datasets, by_hand)),
    )


def _tables(now: Mapping[str, Table], then: Mapping[str, Table]) -> dict[str, Table]:
    return {name: _beside(table, then[name]) if name in then else table for name, table in now.items()}


def _beside(now: Table, then: Table) -> Table:
    cells = {key: _cell(cell, then.cells.get(key)) for key, cell in now.cells.items()}

    def average(method: str) -> Cell:
        """Compare averages only if they are over the same columns and each of these columns is compared."""
        found, earlier = _known(now, method), _known(then, method)
        same = found == earlier and all(cells[method, column].before is not None for column in found)
        return _cell(now.averages[method], then.averages.get(method) if same else None)

    return replace(now, cells=cells, averages={method: average(method) for method in now.averages})


def _known(table: Table, method: str) -> set[str]:
    """Return the columns in which a method has a number."""
    return {column for (name, column), cell in table.cells.items() if name == method and cell.mean is not None}


def _cell(now: Cell, then: Cell | None) -> Cell:
    """Add the earlier cell, if it has a number and is over the same held-out environments."""
    if then is None or then.mean is None or not math.isfinite(then.mean) or _environments(now) != _environments(then):
        return now
    return replace(now, before=then)


def _environments(cell: Cell) -> set[int]:
    return {trial.selected.test_env for trial in cell.trials if trial.selected is not None}


def _changes(now: Mapping[str, Table], then: Mapping[str, Table], by_hand: _ByHand) -> Iterator[Change]:
    for dataset in [name for name in now if name in then]:
        after, before = now[dataset], then[dataset]
        for method in [name for name in after.methods if name in before.methods]:
            compared = _paired(trial_accuracies(after, method), trial_accuracies(before, method))
            if compared is not None:
                settings = (*_other_settings(after, before, method), *by_hand.get((dataset, method), ()))
                yield Change(dataset, method, compared, settings)


def _other_settings(now: Table, then: Table, method: str) -> tuple[str, ...]:
    """Describe the settings of a method, such as its number of steps, that differ between two sets of runs."""
    after, before = _settings(now, method), _settings(then, method)
    return tuple(
        f"{name} {after.get(name, 'none')}, before {before.get(name, 'none')}"
        for name in sorted(after.keys() | before.keys())
        if after.get(name) != before.get(name)
    )


def _settings(table: Table, method: str) -> dict[str, str]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for selected in selections(table, method).values():
        for name, value in settings_of(selected.run.spec).items():
            found[name].add(value)
    return {name: " or ".join(sorted(values)) for name, values in found.items()}


GUEST = "sandmask.paper"  # provides published numbers; the library itself has none


def has_published() -> bool:
    """Whether the numbers of the paper are installed."""
    return find_spec(GUEST) is not None


def beside_published(report: Report) -> Report:
    """Add the paper's numbers to the cells that have one."""
    if not has_published():
        raise SandmaskError(f"The paper's numbers are in {GUEST}, which is not installed. Leave out --against-paper.")
    beside_paper: Callable[[Table, str, str | None], Table] = import_module(f"{GUEST}._printed").beside_paper
    rules = []
    for rule in report.rules:
        tables = {name: beside_paper(table, rule.rule, name) for name, table in rule.datasets.items()}
        averages = None if rule.averages is None else beside_paper(rule.averages, rule.rule, None)
        rules.append(replace(rule, datasets=tables, averages=averages))
    return replace(report, rules=tuple(rules))
