"""From runs to a page: its content, its text, and the file."""

import html
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from sandmask._files import replacing
from sandmask._text import printable
from sandmask._version import __version__
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, judged_by_first_stage, split_averages
from sandmask.records._reader import refuse_record_name
from sandmask.reports._data import Report, beside_published, has_published
from sandmask.reports._for_programs import json_content
from sandmask.reports._report import build_report
from sandmask.reports._tables import BEST_NOTE
from sandmask.reports.html._curves import RUNS_PER_CHUNK, choose_detail, chunks, json_blob
from sandmask.reports.html._tables import all_offers, regrets, run_columns, table_words
from sandmask.selection import RULES, find_rule, method_names


def write_html(
    runs: Sequence[RunRecord], path: str | os.PathLike[str], rules: Sequence[str] | None = None, **settings: Any
) -> Path:
    """Write the page of `render_html` to a file, which is complete or absent.

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
            temporary.touch()  # an unwritable place is told before the work is done
            temporary.write_text(render_html(runs, rules, **settings), encoding="utf-8")
    except OSError as error:
        raise SandmaskError(f"{target} cannot be written: {error.strerror}. Name another place.") from error
    return target


_SCRIPTS = (
    "dom", "data", "state", "formats", "scales", "draw", "charts", "ranks", "figure", "table", "controls",
    "overview", "cells", "tables", "comparisons", "hyperparameters", "regret", "runs", "diagnostics", "run", "main",
)  # fmt: skip
_STYLES = ("base", "layout", "tables", "figures")


def render_html(
    runs: Sequence[RunRecord],
    rules: Sequence[str] | None = None,
    *,
    title: str = "sandmask report",
    against_paper: bool = False,
    baseline: str = "ERM",
    statistics: bool = True,
    draws: int | None = None,
    trials: int | None = None,
    metrics: Sequence[str] | None = None,
    earlier: Sequence[RunRecord] | None = None,
) -> str:
    """Return a self-contained page with all tables and every run's curves.

    :param runs: records of the runs.
    :param rules: names of selection rules; all if not given.
    :param title: title of the page.
    :param against_paper: show the paper's numbers at first; the page has a switch.
    :param baseline: method that the others are compared with.
    :param statistics: include the comparisons with the baseline.
    :param draws: number of draws in a complete cell; as many as there are if not given.
    :param trials: number of trials in a complete cell; as many as there are if not given.
    :param metrics: metrics beyond accuracy to include; the recorded ones that are a number for each environment if
        not given.
    :param earlier: records of other runs to compare with.
    """
    runs = list(judged_by_first_stage(split_averages(runs)))
    names = list(RULES) if rules is None else list(dict.fromkeys(find_rule(name).name for name in rules))
    report = build_report(runs, names, baseline=baseline, draws=draws, trials=trials, metrics=metrics, earlier=earlier)
    if not statistics:
        report = replace(report, rules=tuple(replace(rule, statistics=None) for rule in report.rules))
    of_id = method_names(runs)
    methods = [of_id[run.spec.id] for run in runs]
    offers, detail = all_offers(runs, names), choose_detail(runs)
    content = {
        "title": title,
        "againstPaper": against_paper and has_published(),
        "overview": overview(runs, methods),
        "detail": asdict(detail),
        "thinned": any(len(run.steps) > detail.points for run in runs),
        **_report_content(report),
    }
    blobs = {"report": json_blob(content), "runs": json_blob(run_columns(runs, methods, offers))}
    blobs |= {f"curves-{number}": text for number, text in enumerate(chunks(runs, offers, detail))}
    return _fill(title, blobs)


def _report_content(report: Report) -> dict[str, Any]:
    with_paper = beside_published(report) if has_published() else report
    return {
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "report": json_content(with_paper),
        "words": table_words(report, with_paper),
        "rules": {
            rule.name: {"usesTestData": rule.uses_test_data, "needsPairs": rule.needs_pairs}
            for rule in (find_rule(each.rule) for each in report.rules)
        },
        "regrets": regrets(report),
        "bestNote": BEST_NOTE,
        "runsPerChunk": RUNS_PER_CHUNK,
    }


def _asset(name: str) -> str:
    return files("sandmask.reports.html").joinpath("assets", name).read_text(encoding="utf-8")


def _fill(title: str, blobs: dict[str, str]) -> str:
    """The template with its parts put in."""
    parts = {
        "title": html.escape(printable(title)),
        "styles": "\n".join(_asset(f"{name}.css") for name in _STYLES),
        "scripts": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
        "data": "\n".join(
            f'<script type="application/octet-stream" id="data-{name}">{text}</script>' for name, text in blobs.items()
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


_SETTINGS = ("steps", "network", "precision", "space")


def overview(runs: Sequence[RunRecord], methods: Sequence[str]) -> dict[str, Any]:
    """Counts of all runs, and for each dataset what its runs have in common and in what they differ.

    `methods` are the runs' methods, one each.
    """
    of_dataset: defaultdict[str, list[tuple[RunRecord, str]]] = defaultdict(list)
    for run, method in zip(runs, methods, strict=True):
        of_dataset[run.spec.dataset].append((run, method))
    return {
        "runs": len(runs),
        "methods": len(set(methods)),
        "status": dict(Counter(run.status for run in runs)),
        "datasets": {name: _dataset(found) for name, found in of_dataset.items()},
    }


def _dataset(found: Sequence[tuple[RunRecord, str]]) -> dict[str, Any]:
    specs = [run.spec for run, _ in found]
    return {
        "environments": list(found[0][0].env_names),
        "runs": len(found),
        "methods": len({method for _, method in found}),
        "trials": len({spec.trial_seed for spec in specs}),
        "draws": len({spec.hparams_seed for spec in specs}),
        **{name: sorted({getattr(spec, name) for spec in specs}) for name in _SETTINGS},
    }
