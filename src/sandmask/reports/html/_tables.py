"""The page's tables: results as text, the regret of each rule, and the runs with the selection of each rule."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sandmask.records import RunRecord
from sandmask.reports._data import Report, RuleReport, Table
from sandmask.reports._grids import grids
from sandmask.reports.statistics import bootstrap_interval
from sandmask.selection import Selected, candidates, find_rule, group_runs


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


Offers = Mapping[str, Mapping[int, Selected]]  # by rule and by the run's place in the list


def all_offers(runs: Sequence[RunRecord], rules: Sequence[str]) -> Offers:
    """The checkpoint that each rule would take of each run, for the runs that it can judge."""
    place = {id(run): number for number, run in enumerate(runs)}
    groups = group_runs(runs)
    return {
        name: {
            place[id(offer.run)]: offer
            for key, group in groups.items()
            for offer in candidates(find_rule(name), group, key.test_env)
        }
        for name in rules
    }


_SETTINGS = ("space", "network", "weights", "precision")


class _Places:
    """Numbers values in the order of their first occurrence, so that repeated values are written once."""

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        return self.found.setdefault(thing, len(self.found))


def run_columns(runs: Sequence[RunRecord], methods: Sequence[str], offers: Offers) -> dict[str, Any]:
    """Specs, statuses, hyperparameters and what each rule makes of each run. Accuracies are in percent.

    `methods` are the runs' methods, one each.
    """
    hparams, settings = _Places(), _Places()
    columns: dict[str, Any] = {
        "id": [run.spec.id for run in runs],
        "method": list(methods),
        "algorithm": [run.spec.algorithm for run in runs],
        "dataset": [run.spec.dataset for run in runs],
        "test": [list(run.spec.test_envs) for run in runs],
        "trial": [run.spec.trial_seed for run in runs],
        "draw": [run.spec.hparams_seed for run in runs],
        "seed": [run.spec.seed for run in runs],
        "status": [run.status for run in runs],
        "at": [int(run.steps[-1]) if len(run.steps) else None for run in runs],
        "divergedAt": [run.diverged_at for run in runs],
        "checkpoints": [len(run.steps) for run in runs],
        "steps": [run.spec.steps for run in runs],
    }
    columns["hparams"] = [hparams.of(json.dumps(run.spec.hparams, sort_keys=True)) for run in runs]
    columns["settings"] = [settings.of(_settings(run)) for run in runs]
    return {
        "columns": columns,
        "hparams": [json.loads(text) for text in hparams.found],
        "settings": [dict(items) for items in settings.found],
        "offers": {rule: _offer_columns(len(runs), offers[rule]) for rule in offers},
    }


def _settings(run: RunRecord) -> tuple[tuple[str, str], ...]:
    named = [(name, str(getattr(run.spec, name))) for name in _SETTINGS]
    options = sorted((name, str(value)) for name, value in run.spec.options.items())
    return (*named, ("checkpoint every", str(run.spec.checkpoint_every)), *options)


def _offer_columns(count: int, found: Mapping[int, Selected]) -> dict[str, list[Any]]:
    offers = [found.get(place) for place in range(count)]
    return {
        "step": [None if offer is None else offer.step for offer in offers],
        "validation": [None if offer is None else _percent(offer.validation) for offer in offers],
        "test": [None if offer is None else _percent(offer.test_accuracy) for offer in offers],
    }


def _percent(value: float) -> float | None:
    return round(100 * value, 4) if math.isfinite(value) else None  # a rule of one's own may value anything
