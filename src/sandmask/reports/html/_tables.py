"""The page's tables as text, and the regret of each rule."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sandmask.reports._data import Report, RuleReport, Table
from sandmask.reports._grids import grids
from sandmask.reports.statistics import bootstrap_interval


def table_words(report: Report) -> dict[str, dict[str, Any]]:
    """For each rule, its tables by name: as they are, and under `paper` with the paper's numbers beside ours.

    Names are `dataset:PACS`, `averages`, `metric:f1:PACS`, `confusion:ERM:PACS`, `changes`, `statistics` and
    `notes`. The report
    has to be made against the paper.
    """
    return {rule.rule: _rule_words(replace(report, rules=(rule,))) for rule in report.rules}


def _rule_words(report: Report) -> dict[str, Any]:
    (rule,) = report.rules
    plain = replace(report, rules=(_without_paper(rule),))
    pairs = zip(_names(rule), grids(plain), grids(report), strict=True)
    return {name: {**asdict(without), "paper": asdict(beside)} for name, without, beside in pairs}


def _names(rule: RuleReport) -> Iterator[str]:
    """The names of a rule's tables, in the order of `grids`."""
    yield from (f"dataset:{name}" for name in rule.datasets)
    if rule.averages is not None:
        yield "averages"
    yield from (f"metric:{metric.metric}:{name}" for metric in rule.metrics for name in metric.datasets)
    yield from (f"confusion:{each.method}:{each.dataset}" for each in rule.confusions)
    if rule.changes:
        yield "changes"
    if rule.statistics is not None:
        yield "statistics"
    if rule.notes:
        yield "notes"


def _without_paper(rule: RuleReport) -> RuleReport:
    return replace(
        rule,
        datasets={name: _table_without(table) for name, table in rule.datasets.items()},
        averages=None if rule.averages is None else _table_without(rule.averages),
    )


def _table_without(table: Table) -> Table:
    return replace(
        table,
        cells={key: replace(cell, paper=None) for key, cell in table.cells.items()},
        averages={key: replace(cell, paper=None) for key, cell in table.averages.items()},
    )


ORACLE = "oracle"
_Pairs = dict[tuple[str, int], float]  # by environment and trial


def regrets(report: Report) -> list[dict[str, Any]]:
    """For each rule, dataset and method, in percent: the mean over (environment, trial) and of each environment.

    Empty without the oracle among the rules. A regret can be negative: the oracle looks at last checkpoints only.
    """
    oracle = next((rule for rule in report.rules if rule.rule == ORACLE), None)
    if oracle is None:
        return []
    return [
        entry
        for rule in report.rules
        if rule.rule != ORACLE
        for name, table in rule.datasets.items()
        if name in oracle.datasets
        for method in table.methods
        for entry in _regret(rule, name, method, table, oracle.datasets[name])
    ]


def _regret(rule: RuleReport, dataset: str, method: str, ours: Table, oracle: Table) -> list[dict[str, Any]]:
    best, reached = _accuracies(oracle, method), _accuracies(ours, method)
    pairs = {key: best[key] - reached[key] for key in reached if key in best}
    if not pairs:
        return []
    values = list(pairs.values())
    return [
        {
            "rule": rule.rule,
            "dataset": dataset,
            "method": method,
            "mean": float(np.mean(values)),
            "interval": bootstrap_interval(values),
            "pairs": len(values),
            "environments": _by_environment(pairs),
        }
    ]


def _accuracies(table: Table, method: str) -> _Pairs:
    return {
        (column, trial.trial_seed): 100 * trial.selected.test_accuracy
        for column in table.columns
        for trial in table.cells[method, column].trials
        if trial.selected is not None
    }


def _by_environment(pairs: _Pairs) -> dict[str, float]:
    names = dict.fromkeys(environment for environment, _ in pairs)
    return {name: float(np.mean([value for key, value in pairs.items() if key[0] == name])) for name in names}
