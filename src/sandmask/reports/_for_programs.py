"""Reports for other programs: JSON with all computed data, CSV with one line per cell, and the command of a run."""

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sandmask._text import printable
from sandmask.records import RunRecord, RunSpec
from sandmask.reports._data import Cell, Report, RuleReport, Statistics, Table, Trial
from sandmask.reports._tables import best_cells

if TYPE_CHECKING:
    import pandas as pd


_NUMBERS = ("steps", "checkpoint_every", "hparams_seed", "trial_seed", "seed")


def run_command(run: RunRecord | RunSpec, environments: Sequence[str] = ()) -> str:
    """Return the `sandmask train` command that trains a run again, for a shell; "" for soups and imported runs.

    It names every setting and hyperparameter, so that it does not depend on defaults.

    :param run: a record, or its spec.
    :param environments: names of the environments, for a spec, which does not contain them. Numbers if not given.
    """
    spec, names = (run.spec, run.env_names) if isinstance(run, RunRecord) else (run, environments)
    if "soup" in spec.options or "source" in spec.options:
        return ""
    words = ["sandmask", "train", spec.dataset, spec.algorithm]
    for env in spec.test_envs:
        words += ["--test-env", names[env] if names else str(env)]
    for name in _NUMBERS:
        words += [f"--{name.replace('_', '-')}", str(getattr(spec, name))]
    words += ["--space", spec.space, "--network", spec.network, "--precision", spec.precision]
    if spec.weights != "pretrained" and spec.network not in ("mlp", "mnist-convnet"):
        words += ["--weights", spec.weights]
    averages = spec.options.get("averages") or spec.options.get("average")
    words += ["--average", str(averages)] if averages else []
    words += ["--shared-init"] if spec.options.get("init") == "shared" else []
    for name, value in spec.hparams.items():
        words += ["--hparam", f"{name}={value!r}"]
    return shlex.join(words)


def to_json(report: Report) -> str:
    """Format the report as indented JSON."""
    text = json.dumps(finite(json_content(report)), indent=2, ensure_ascii=False, allow_nan=False)
    return "\n".join(map(_escaped, text.split("\n"))) + "\n"


def json_content(report: Report) -> dict[str, Any]:
    """Return everything that was computed, in percent. `schema` is increased when the layout changes."""
    return {"schema": 1, "runs": report.runs, "selections": [_rule(rule) for rule in report.rules]}


def _escaped(line: str) -> str:
    """Escape the control characters that the JSON encoder leaves unchanged and a terminal would interpret."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
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
        content["metrics"] = {
            metric.metric: {
                "title": metric.title,
                "description": metric.description,
                "datasets": {name: _table(table) for name, table in metric.datasets.items()},
            }
            for metric in rule.metrics
        }
    if rule.changes:
        content["changes"] = [asdict(change) for change in rule.changes]
    if rule.confusions:
        content["confusions"] = [asdict(confusion) for confusion in rule.confusions]
    return content


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
        content["before"] = {"mean": cell.before.mean, "error": cell.before.error, "change": cell.change}
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


HEADER = (
    *("selection", "dataset", "method", "environment", "mean", "standard_error", "interval_low", "interval_high"),
    *("columns", "expected_columns", "runs", "expected_runs", "diverged_runs"),
    *("paper", "paper_standard_error", "difference_to_paper", "metric", "before", "before_standard_error", "change"),
)
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?|-")


def to_csv(report: Report) -> str:
    """Format every cell of the tables as a line of CSV.

    The environment "Avg" is the average of a dataset, and the dataset "Avg" is the average over datasets. If an
    environment or dataset is named "Avg", the average is "Avg of columns". Metrics beyond accuracy have lines of their
    own; for per-class accuracy, the environment is a class.
    """
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(HEADER)
    for row in _rows(report):
        writer.writerow([*map(csv_word, row[:4]), *row[4:]])
    return target.getvalue()


def to_frame(report: Report) -> "pd.DataFrame":
    """Return the same cells as a pandas data frame, with unescaped names, and NaN for missing numbers."""
    import pandas as pd

    found = pd.DataFrame(_rows(report), columns=list(HEADER))
    numbers = [name for name in HEADER[4:] if name != "metric"]
    return found.astype(dict.fromkeys(numbers, float))


def csv_word(word: str) -> str:
    """Put an apostrophe before a word that a spreadsheet could take for a formula."""
    safe = printable(word)
    return f"'{safe}" if _FORMULA.match(safe) and not _NUMBER.fullmatch(safe) else safe


def _rows(report: Report) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the columns of `HEADER` for each cell."""
    for rule in report.rules:
        for metric, *words, cell in _cells(rule):
            low, high = cell.interval or (None, None)
            paper, parts, before = cell.paper, cell.parts, cell.before
            numbers = (
                *(cell.mean, cell.error, low, high),
                *((None, None) if parts is None else (parts.found, parts.of)),
                *(cell.have, cell.expected, cell.diverged),
                *((None, None) if paper is None else (paper.mean, paper.error)),
                cell.difference,
            )
            changes = (None, None) if before is None else (before.mean, before.error)
            yield (rule.rule, *words, *finite(numbers), metric, *changes, cell.change)


def _cells(rule: RuleReport) -> Iterator[tuple[str, str, str, str, Cell]]:
    """Yield every cell with its metric, dataset, method and environment."""
    tables = [("accuracy", name, table) for name, table in rule.datasets.items()]
    tables += [(metric.metric, name, table) for metric in rule.metrics for name, table in metric.datasets.items()]
    for number, (metric, dataset, table) in enumerate(tables, start=1):
        for method in table.methods:
            for column in table.columns:
                yield metric, dataset, method, column, table.cells[method, column]
            average = table.averages[method]
            if metric == "accuracy" and rule.averages is not None:
                average = rule.averages.cells[method, dataset]  # this average has an error
            yield metric, dataset, method, table.average_title, average
        if number == len(rule.datasets) > 1 and rule.averages is not None:
            title = rule.averages.average_title
            for method, average in rule.averages.averages.items():
                yield metric, title, method, title, average
