"""The page's tables: results as text, the regret of each rule, and the runs with the selection of each rule."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from sandmask.records import RunRecord
from sandmask.reports._data import Report
from sandmask.reports._grids import named_grids
from sandmask.reports._tables import trial_accuracies
from sandmask.reports.statistics import bootstrap_interval
from sandmask.selection import Selected, candidates, find_rule, group_runs


def table_words(report: Report, with_paper: Report) -> dict[str, dict[str, Any]]:
    """For each rule, its tables by name: as they are, and under `paper` with the paper's numbers beside ours."""
    return {
        rule.rule: {
            name: {**asdict(grid), "paper": asdict(beside)}
            for (name, grid), (_, beside) in zip(named_grids(rule), named_grids(rule_with_paper), strict=True)
        }
        for rule, rule_with_paper in zip(report.rules, with_paper.rules, strict=True)
    }


ORACLE = "oracle"


def regrets(report: Report) -> list[dict[str, Any]]:
    """For each rule, dataset and method, in percent: the mean over (environment, trial) and of each environment.

    Empty without the oracle among the rules. A regret can be negative: the oracle looks at last checkpoints only.
    """
    oracle = {name: table for rule in report.rules if rule.rule == ORACLE for name, table in rule.datasets.items()}
    found = []
    for rule in report.rules:
        for dataset in [name for name in rule.datasets if name in oracle and rule.rule != ORACLE]:
            for method in rule.datasets[dataset].methods:
                best, reached = (trial_accuracies(t, method) for t in (oracle[dataset], rule.datasets[dataset]))
                pairs = {key: best[key] - reached[key] for key in reached if key in best}
                if pairs:
                    names = {"rule": rule.rule, "dataset": dataset, "method": method}
                    found.append({**names, **_mean_regret(pairs)})
    return found


def _mean_regret(pairs: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    values = list(pairs.values())
    of_environment: defaultdict[str, list[float]] = defaultdict(list)
    for (environment, _), value in pairs.items():
        of_environment[environment].append(value)
    return {
        "mean": float(np.mean(values)),
        "interval": bootstrap_interval(values),
        "pairs": len(values),
        "environments": {name: float(np.mean(some)) for name, some in of_environment.items()},
    }


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
