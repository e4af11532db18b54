"""Columns of the page's table of runs, and the selection of each rule."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sandmask.records import RunRecord
from sandmask.selection import Selected, candidates, find_rule, group_runs

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
