"""Create the HTML page from runs, and compute its data: tables, regrets of the rules, and runs."""

import html
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from sandmask._files import replacing
from sandmask._text import printable
from sandmask._version import __version__
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, judged_by_first_stage, split_averages, trained
from sandmask.records._reader import refuse_record_name
from sandmask.records._types import dataset_order
from sandmask.reports._comparisons import beside_published, has_published
from sandmask.reports._data import Report
from sandmask.reports._for_programs import json_content
from sandmask.reports._grids import named_grids
from sandmask.reports._report import build_report
from sandmask.reports._tables import BEST_NOTE, trial_accuracies
from sandmask.reports.html._curves import RUNS_PER_CHUNK, Offers, choose_detail, chunks, json_blob
from sandmask.reports.statistics import bootstrap_interval
from sandmask.selection import RULES, Selected, candidates, find_rule, group_runs, method_names


def write_html(
    runs: Sequence[RunRecord], path: str | os.PathLike[str], rules: Sequence[str] | None = None, **settings: Any
) -> Path:
    """Write the page of `render_html` to a file. The file is written as a whole or not at all.

    :param runs: records of the runs.
    :param path: file to write.
    :param rules: names of selection rules; all if not given.
    :param settings: other arguments of `render_html`.
    :return: the path of the file.
    """
    target = Path(path)
    refuse_record_name(target)
    if target.is_dir():
        raise SandmaskError(f"{target} is a folder. Name the file to write, such as {target / 'report.html'}.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.touch()  # fails early if the file cannot be written
            temporary.write_text(render_html(runs, rules, **settings), encoding="utf-8")
    except OSError as error:
        raise SandmaskError(f"{target} cannot be written: {error.strerror}. Name another place.") from error
    return target


_SCRIPTS = (
    "dom", "data", "state", "draw", "charts", "figure", "table",
    "overview", "tables", "comparisons", "hyperparameters", "regret", "runs", "diagnostics", "run", "main",
)  # fmt: skip


def render_html(
    runs: Sequence[RunRecord],
    rules: Sequence[str] | None = None,
    *,
    title: str = "sandmask report",
    against_paper: bool = False,
    statistics: bool = True,
    **settings: Any,
) -> str:
    """Return a self-contained page with all tables and every run's curves.

    :param runs: records of the runs.
    :param rules: names of selection rules; all if not given.
    :param title: title of the page.
    :param against_paper: show the paper's numbers when the page opens; the page has a switch for them.
    :param statistics: include the comparisons with the baseline.
    :param settings: other arguments of `build_report`: `baseline`, `draws`, `trials`, `metrics` and `earlier`.
    """
    runs = list(judged_by_first_stage(split_averages(runs)))
    names = list(RULES) if rules is None else list(dict.fromkeys(find_rule(name).name for name in rules))
    report = build_report(runs, names, **settings)
    if not statistics:
        report = replace(report, rules=tuple(replace(rule, statistics=None) for rule in report.rules))
    with_paper = beside_published(report) if has_published() else report
    of_id = method_names(runs)
    methods = [of_id[run.spec.id] for run in runs]
    offers, detail = all_offers(runs, names), choose_detail(runs)
    content = {
        "title": title,
        "againstPaper": against_paper and has_published(),
        "overview": overview(runs, methods),
        "detail": asdict(detail),
        "thinned": any(len(run.steps) > detail.points for run in runs),
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "report": json_content(with_paper),
        "words": table_words(report, with_paper),
        "rules": {
            rule.name: {"usesTestData": rule.uses_test_data, "needsPairs": rule.needs_pairs}
            for rule in map(find_rule, names)
        },
        "regrets": regrets(report),
        "bestNote": BEST_NOTE,
        "runsPerChunk": RUNS_PER_CHUNK,
    }
    blobs = {"report": json_blob(content), "runs": json_blob(run_columns(runs, methods, offers))}
    blobs |= {f"curves-{number}": text for number, text in enumerate(chunks(runs, offers, detail))}
    return _fill(title, blobs)


def _asset(name: str) -> str:
    return files("sandmask.reports.html").joinpath("assets", name).read_text(encoding="utf-8")


def _fill(title: str, blobs: dict[str, str]) -> str:
    """Fill the template."""
    parts = {
        "title": html.escape(printable(title)),
        "styles": _asset("page.css"),
        "scripts": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
        "data": "\n".join(
            f'<script type="application/octet-stream" id="data-{name}">{text}</script>' for name, text in blobs.items()
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def overview(runs: Sequence[RunRecord], methods: Sequence[str]) -> dict[str, Any]:
    """Count the trained runs, and list the settings of the runs on each dataset. `methods` has the method of each run.

    Averages of weights count as methods but not as runs.
    """
    of_dataset: defaultdict[str, list[tuple[RunRecord, str]]] = defaultdict(list)
    for run, method in zip(runs, methods, strict=True):
        of_dataset[run.spec.dataset].append((run, method))
    return {
        "runs": len(trained(runs)),
        "methods": len(set(methods)),
        "status": dict(Counter(run.status for run in trained(runs))),
        "datasets": {name: _dataset(of_dataset[name]) for name in dataset_order(list(of_dataset))},
    }


def _dataset(found: Sequence[tuple[RunRecord, str]]) -> dict[str, Any]:
    specs = [run.spec for run, _ in found]
    return {
        "environments": list(found[0][0].env_names),
        "runs": len(trained([run for run, _ in found])),
        "methods": len({method for _, method in found}),
        "trials": len({spec.trial_seed for spec in specs}),
        "draws": len({spec.hparams_seed for spec in specs}),
        "steps": sorted({spec.steps for spec in specs}),
        "network": sorted({spec.network for spec in specs}),
        "precision": sorted({spec.precision for spec in specs}),
        "space": sorted({spec.space for spec in specs}),
    }


def table_words(report: Report, with_paper: Report) -> dict[str, dict[str, Any]]:
    """Return the text of each rule's tables by name: without the paper's numbers, and under `paper` with them."""
    return {
        rule.rule: {
            name: {**asdict(grid), "paper": asdict(beside)}
            for (name, grid), (_, beside) in zip(named_grids(rule), named_grids(rule_with_paper), strict=True)
        }
        for rule, rule_with_paper in zip(report.rules, with_paper.rules, strict=True)
    }


ORACLE = "oracle"


def regrets(report: Report) -> list[dict[str, Any]]:
    """Compute the regret of each rule, dataset and method: the oracle's accuracy minus the rule's, in percent.

    Each entry has the mean over (environment, trial) pairs and the mean of each environment. The list is empty if the
    oracle is not among the rules. A regret can be negative, because the oracle considers only last checkpoints.
    """
    oracle = {name: table for rule in report.rules if rule.rule == ORACLE for name, table in rule.datasets.items()}
    found = []
    for rule in report.rules:
        if rule.rule == ORACLE:
            continue
        for dataset in [name for name in rule.datasets if name in oracle]:
            for method in rule.datasets[dataset].methods:
                best = trial_accuracies(oracle[dataset], method)
                reached = trial_accuracies(rule.datasets[dataset], method)
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


def all_offers(runs: Sequence[RunRecord], rules: Sequence[str]) -> Offers:
    """Return the checkpoint that each rule would select in each run that it can judge."""
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


def run_columns(runs: Sequence[RunRecord], methods: Sequence[str], offers: Offers) -> dict[str, Any]:
    """Return columns of specs, statuses, hyperparameters and offers. `methods` has the method of each run."""
    hparams, distinct_hparams = _numbered([json.dumps(run.spec.hparams, sort_keys=True) for run in runs])
    settings, distinct_settings = _numbered([_settings(run) for run in runs])
    return {
        "columns": {
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
            "hparams": hparams,
            "settings": settings,
        },
        "hparams": [json.loads(text) for text in distinct_hparams],
        "settings": [dict(items) for items in distinct_settings],
        "offers": {rule: _offer_columns(len(runs), offers[rule]) for rule in offers},
    }


def _numbered(values: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """Return the index of each value in the list of distinct values, and that list, to store each value once."""
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return [places[value] for value in values], list(places)


def _settings(run: RunRecord) -> tuple[tuple[str, str], ...]:
    named = [(name, str(getattr(run.spec, name))) for name in ("space", "network", "weights", "precision")]
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
    return round(100 * value, 4) if math.isfinite(value) else None  # rules of users may return NaN or inf
