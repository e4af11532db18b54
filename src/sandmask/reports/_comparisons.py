"""Statistics over a rule's tables: paired comparisons with the baseline or with earlier runs, and mean ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.reports._data import Before, Cell, Change, Comparison, MetricReport, Report, RuleReport, Statistics, Table
from sandmask.reports._tables import Trials, is_of, method_order
from sandmask.reports.statistics import critical_difference, mean_ranks, paired_comparison
from sandmask.selection import is_soup, settings_of

ALL = "all"
_Condition = tuple[str, str, int]  # dataset, environment, trial
_Scores = dict[str, dict[_Condition, float]]  # of each method


def compare(trials: Mapping[str, Trials], baseline: str) -> Statistics | None:
    """Compare every method with the baseline on each dataset, and on all together when there are several.

    None when there is nothing to compare: no baseline among the methods, or no other method.
    """
    scores = _scores(trials)
    methods = method_order(list(scores))
    reference = next((name for name in methods if is_of(name, baseline)), None)
    if reference is None or len(methods) < 2:
        return None
    scopes = {dataset: [dataset] for dataset in trials}
    if len(trials) > 1:
        scopes[ALL if ALL not in trials else f"{ALL} datasets"] = list(trials)
    comparisons: list[Comparison] = []
    critical = {}
    for scope, datasets in scopes.items():
        within = {
            method: {key: value for key, value in found.items() if key[0] in datasets}
            for method, found in scores.items()
        }
        present = [method for method in methods if within[method]]
        ranks, conditions = _ranks(present, within, reference)
        if len(ranks) > 1 and conditions > 1:
            critical[scope] = critical_difference(len(ranks), conditions)
        for method in present:
            pairs = sorted(within[method].keys() & within[reference].keys())
            against = None
            if method != reference and pairs:
                against = paired_comparison(
                    [within[method][key] for key in pairs], [within[reference][key] for key in pairs]
                )
            comparisons.append(Comparison(scope, method, ranks.get(method), against))
    return Statistics(reference, tuple(comparisons), critical)


def _scores(trials: Mapping[str, Trials]) -> _Scores:
    """Accuracies in percent, of the conditions in which a rule found something to choose, and that is a number."""
    scores: _Scores = {}
    for dataset, tables in trials.items():
        for (method, environment), found in tables.items():
            of_method = scores.setdefault(method, {})
            for trial in found:
                if trial.selected is not None and math.isfinite(trial.selected.test_accuracy):
                    key = (dataset, environment, trial.trial_seed)
                    of_method[key] = 100 * trial.selected.test_accuracy
    return scores


def _ranks(methods: Sequence[str], scores: _Scores, reference: str) -> tuple[dict[str, float], int]:
    """Mean ranks over the baseline's cells (means over trials), of the methods that have them all.

    Also how many cells those are. Soups have no rank: they are of many runs, and would change the ranks of the others.
    """
    means = {method: _cell_means(scores[method]) for method in methods}
    cells = sorted(means.get(reference, {}))
    ranked = [name for name in methods if cells and means[name].keys() >= set(cells) and not is_soup(name)]
    if len(ranked) < 2:
        return {}, 0
    table = np.array([[means[method][cell] for method in ranked] for cell in cells])
    return dict(zip(ranked, mean_ranks(table).tolist(), strict=True)), len(cells)


def _cell_means(scores: Mapping[_Condition, float]) -> dict[tuple[str, str], float]:
    cells: dict[tuple[str, str], list[float]] = {}
    for (dataset, environment, _), value in sorted(scores.items()):
        cells.setdefault((dataset, environment), []).append(value)
    return {cell: float(np.mean(values)) for cell, values in cells.items()}


def beside_earlier(report: Report, earlier: Report) -> Report:
    """The same report with the number of an earlier one in every cell that both have.

    :param report: the later report.
    :param earlier: a report of other runs under the same selection rules.
    """
    rules = [_rule(now, then) for now, then in zip(report.rules, earlier.rules, strict=True)]
    if not any(rule.changes for rule in rules):
        raise SandmaskError(
            "The two sets of runs have no dataset, method and held-out environment in common, so there is nothing to "
            "compare. A method is the same if its algorithm and settings are."
        )
    return replace(report, rules=tuple(rules))


def _rule(now: RuleReport, then: RuleReport) -> RuleReport:
    both = [name for name in now.datasets if name in then.datasets]
    averages = now.averages
    if averages is not None and then.averages is not None:
        averages = _beside(averages, then.averages)
    return replace(
        now,
        datasets=_tables(now.datasets, then.datasets),
        averages=averages,
        metrics=tuple(_metrics(now.metrics, then.metrics)),
        changes=tuple(change for name in both for change in _changes(name, now.datasets[name], then.datasets[name])),
    )


def _metrics(now: tuple[MetricReport, ...], then: tuple[MetricReport, ...]) -> Iterator[MetricReport]:
    earlier = {metric.metric: metric.datasets for metric in then}
    for metric in now:
        yield replace(metric, datasets=_tables(metric.datasets, earlier.get(metric.metric, {})))


def _tables(now: Mapping[str, Table], then: Mapping[str, Table]) -> dict[str, Table]:
    return {name: _beside(table, then[name]) if name in then else table for name, table in now.items()}


def _beside(now: Table, then: Table) -> Table:
    cells = {key: _cell(cell, then.cells.get(key)) for key, cell in now.cells.items()}

    def average(method: str) -> Cell:
        """Averages compare where they are over the same columns, and each of those compares."""
        found, earlier = _known(now, method), _known(then, method)
        same = found == earlier and all(cells[method, column].before is not None for column in found)
        return _cell(now.averages[method], then.averages.get(method) if same else None)

    return replace(now, cells=cells, averages={method: average(method) for method in now.averages})


def _known(table: Table, method: str) -> set[str]:
    """The columns in which a method has a number."""
    return {column for (name, column), cell in table.cells.items() if name == method and cell.mean is not None}


def _cell(now: Cell, then: Cell | None) -> Cell:
    """Numbers of several environments, such as averages, compare where those are the same."""
    if then is None or then.mean is None or _environments(now) != _environments(then):
        return now
    return replace(now, before=Before(then.mean, then.error))


def _environments(cell: Cell) -> set[int]:
    return {trial.selected.test_env for trial in cell.trials if trial.selected is not None}


def _changes(dataset: str, now: Table, then: Table) -> Iterator[Change]:
    for method in now.methods:
        after, before = _trials(now, method), _trials(then, method)
        pairs = sorted(after.keys() & before.keys())
        if pairs:
            compared = paired_comparison([after[key] for key in pairs], [before[key] for key in pairs])
            yield Change(dataset, method, compared, _other_settings(now, then, method))


def _other_settings(now: Table, then: Table, method: str) -> tuple[str, ...]:
    """The settings of a method, such as its number of steps, that are not the same in two sets of runs."""
    after, before = _settings(now, method), _settings(then, method)
    return tuple(
        f"{name} {after.get(name, 'none')}, before {before.get(name, 'none')}"
        for name in sorted(after.keys() | before.keys())
        if after.get(name) != before.get(name)
    )


def _settings(table: Table, method: str) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for column in table.columns:
        for trial in table.cells[method, column].trials if (method, column) in table.cells else ():
            if trial.selected is not None:
                for name, value in settings_of(trial.selected.run.spec).items():
                    found.setdefault(name, set()).add(value)
    return {name: " or ".join(sorted(values)) for name, values in found.items()}


def _trials(table: Table, method: str) -> dict[tuple[str, int], float]:
    """Accuracies in percent by environment and trial."""
    return {
        (column, trial.trial_seed): 100 * trial.selected.test_accuracy
        for column in table.columns
        for trial in (table.cells[method, column].trials if (method, column) in table.cells else ())
        if trial.selected is not None
    }
