"""A report as JSON: everything that was computed, unrounded."""

import json
import math
from dataclasses import asdict
from typing import Any

from sandmask.reports._commands import run_command
from sandmask.reports._data import Cell, MetricReport, Report, RuleReport, Statistics, Table, Trial
from sandmask.reports._tables import best_cells


def to_json(report: Report) -> str:
    """The report as indented JSON. Numbers are in percent; `schema` counts up when the layout changes."""
    content = {"schema": 1, "runs": report.runs, "selections": [_rule(rule) for rule in report.rules]}
    text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    return "\n".join(map(_escaped, text.split("\n"))) + "\n"


def _escaped(line: str) -> str:
    """JSON with escapes for all that a terminal would obey: the encoder leaves some control characters as they are."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def finite(value: Any) -> Any:
    """The same with null for every number that JSON has no word for: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value


def _rule(rule: RuleReport) -> dict[str, Any]:
    content: dict[str, Any] = {
        "selection": rule.rule,
        "description": rule.description,
        "datasets": {name: _table(table) for name, table in rule.datasets.items()},
        "averages": None if rule.averages is None else _table(rule.averages),
        "statistics": None if rule.statistics is None else _statistics(rule.statistics),
        "notes": list(rule.notes),
    }
    if rule.metrics:
        content["metrics"] = {metric.metric: _metric(metric) for metric in rule.metrics}
    if rule.changes:
        content["changes"] = [asdict(change) for change in rule.changes]
    if rule.confusions:
        content["confusions"] = [asdict(confusion) for confusion in rule.confusions]
    return content


def _metric(metric: MetricReport) -> dict[str, Any]:
    return {
        "title": metric.title,
        "description": metric.description,
        "datasets": {name: _table(table) for name, table in metric.datasets.items()},
    }


def _table(table: Table) -> dict[str, Any]:
    best = best_cells(table)
    return {
        "columns": list(table.columns),
        "rows": [
            {
                "method": method,
                "cells": {
                    column: _cell(table.cells[method, column], (method, column) in best) for column in table.columns
                },
                "average": _cell(table.averages[method], (method, None) in best),
            }
            for method in table.methods
        ],
        "notes": list(table.notes),
        "chances": dict(table.chances),
        **({"lower_is_better": True} if table.lower_is_better else {}),
    }


def _cell(cell: Cell, best: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "mean": cell.mean,
        "error": cell.error,
        "interval": cell.interval,
        "values": list(cell.values),
        "complete": cell.complete,
        "runs": cell.have,
        "expected_runs": cell.expected,
        "diverged_runs": cell.diverged,
        "best": best,
    }
    if cell.parts is not None:
        content["parts"] = asdict(cell.parts)
    if cell.trials:
        content["trials"] = [_trial(trial) for trial in cell.trials]
    if cell.before is not None:
        content["before"] = {**asdict(cell.before), "change": cell.change}
    if cell.paper is not None:
        content["paper"] = {"mean": cell.paper.mean, "error": cell.paper.error, "table": cell.paper.table}
        content["difference"] = cell.difference
    return content


def _trial(trial: Trial) -> dict[str, Any]:
    content: dict[str, Any] = {"trial_seed": trial.trial_seed, "missing": [dict(vars(gap)) for gap in trial.gaps]}
    if trial.selected is not None:
        content |= {
            "run": trial.selected.run.spec.id,
            "command": run_command(trial.selected.run),
            "hparams_seed": trial.selected.run.spec.hparams_seed,
            "test_env": trial.selected.test_env,
            "step": trial.selected.step,
            "validation": 100 * trial.selected.validation,
            "test": 100 * trial.selected.test_accuracy,
        }
    return content


def _statistics(statistics: Statistics) -> dict[str, Any]:
    return {
        "baseline": statistics.baseline,
        "critical_differences": dict(statistics.critical_differences),
        "comparisons": [asdict(comparison) for comparison in statistics.comparisons],
    }
