"""Names come from files, and may hold anything: no format passes on what a reader of it would obey."""

import csv
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, read_runs
from sandmask.records._lines import encoded, run_line
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import FORMATS, build_report, render
from sandmask.reports._for_programs import csv_word
from sandmask.reports.html import render_html

ESCAPE, CSI, BIDI = "\x1b[31m", "\x9b31m", "\u202e"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE = "=1+1 <script>alert(1)</script> | [x](javascript:1) " + ESCAPE + CSI + BIDI + "\r\n& 5%"


def hostile_sweep() -> list[RunRecord]:
    runs = made_up_sweep(["ERM", HOSTILE], dataset=HOSTILE, trials=1)
    runs[0] = replace(runs[0], status="diverged", diverged_at=3)
    return [replace(run, env_names=(HOSTILE, "-2+3", "@x")) for run in runs]


@pytest.mark.parametrize("name", list(FORMATS))
def test_no_format_passes_on_control_characters(name: str) -> None:
    words = render(build_report(hostile_sweep()), name)
    assert not CONTROL.search(words.replace("\r\n", "\n"))
    if name == "json":
        assert json.loads(words)["selections"][0]["datasets"][HOSTILE]["columns"][0] == HOSTILE


def test_markdown_has_no_html_no_links_and_no_cells_too_many() -> None:
    words = render(build_report(hostile_sweep()), "markdown")
    assert "<script" not in words
    assert "&lt;script>" in words
    assert "](" not in words
    rows = [line for line in words.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[:4]}) == 1


def test_markdown_shows_names_as_they_are() -> None:
    names = ("*6*", "__init__", r"a\b", "weight_decay", "`x`")
    runs = [replace(run, env_names=names[: len(run.env_names)]) for run in made_up_sweep(["ERM"], environments=5)]
    words = render(build_report(runs), "markdown")
    assert r"| \*6\* | \_\_init\_\_ | a\\b | weight_decay | \`x\` |" in words


def test_csv_has_no_formulas() -> None:
    lines = list(csv.reader(io.StringIO(render(build_report(hostile_sweep()), "csv"))))
    assert lines[0][:4] == ["selection", "dataset", "method", "environment"]
    assert {len(line) for line in lines} == {len(lines[0])}
    words = {word for line in lines[1:] for word in line[:4]}
    assert {"'-2+3", "'@x"} <= words
    assert not any(word[0] in "=+-@\t\r" for word in words)
    assert csv_word("-1.5") == "-1.5"
    assert csv_word("-") == "-"
    assert csv_word("+cmd|' /C calc'!A0").startswith("'+")


def test_csv_has_the_numbers_of_the_report() -> None:
    runs = made_up_sweep(["ERM", "IRM"]) + made_up_sweep(["ERM"], dataset="Two")
    rule = build_report(runs).rules[0]
    assert rule.averages is not None
    lines = list(csv.DictReader(io.StringIO(render(build_report(runs), "csv"))))
    found = {(line["dataset"], line["method"], line["environment"]): line for line in lines}
    assert len(found) == len(lines) == 2 * (3 + 1) + (3 + 1) + 2
    cell = rule.datasets["Toy"].cells["IRM", "1"]
    assert float(found["Toy", "IRM", "1"]["mean"]) == cell.mean
    assert float(found["Toy", "IRM", "1"]["standard_error"]) == cell.error
    assert float(found["Toy", "IRM", "Avg"]["standard_error"]) == rule.averages.cells["IRM", "Toy"].error
    overall = found["Avg", "IRM", "Avg"]
    assert (overall["columns"], overall["expected_columns"]) == ("1", "2")


def test_an_environment_or_a_dataset_may_be_named_like_the_average() -> None:
    runs = [replace(run, env_names=("Avg", "1", "2")) for run in made_up_sweep(["ERM"], trials=1)]
    runs += [replace(run, spec=replace(run.spec, dataset="Avg")) for run in runs]
    report = build_report(runs)
    cells = report.frame().set_index(["dataset", "environment"])["mean"]
    assert cells.index.is_unique
    table = report.rules[0].datasets["Toy"]
    assert cells["Toy", "Avg"] == table.cells["ERM", "Avg"].mean
    assert cells["Toy", "Avg of columns"] == pytest.approx(table.averages["ERM"].mean)
    assert cells["Avg of columns", "Avg of columns"] == pytest.approx(table.averages["ERM"].mean)
    header = next(line for line in render(report).splitlines() if line.startswith("Algorithm"))
    assert header.split(maxsplit=4) == ["Algorithm", "Avg", "1", "2", "Avg of columns"]


def test_the_page_takes_any_name() -> None:
    page = render_html(hostile_sweep(), ["training-domain"], title=HOSTILE)
    assert not CONTROL.search(page)
    assert "<script>alert" not in page


def test_numbers_that_are_not_finite_are_null_and_a_dash() -> None:
    runs = made_up_sweep(["ERM", "IRM"], trials=1)
    broken = [replace(run, accuracy_in=run.accuracy_in * float("nan")) for run in runs if run.spec.algorithm == "IRM"]
    odd = [replace(run, spec=replace(run.spec, hparams={"lr": float("inf")})) for run in runs[:12]]
    report = build_report([*odd, *broken])
    rows = json.loads(render(report, "json"))["selections"][0]["datasets"]["Toy"]["rows"]
    assert rows[1]["average"]["mean"] is None
    assert rows[1]["cells"]["0"]["trials"][0]["test"] is None
    line = next(line for line in render(report).splitlines() if line.startswith("IRM"))
    assert line.split() == ["IRM", "-", "-", "-", "-"]
    assert "nan" not in render(report, "csv")
    assert "nan" not in render(report)
    render_html([*odd, *broken], ["training-domain"])


def test_a_huge_name_is_refused_at_once(tmp_path: Path) -> None:
    run = made_up_run([[0.5, 0.5]], algorithm="E" * 5_000_000)
    (tmp_path / "records.jsonl").write_bytes(encoded(run_line(run.spec, run.env_names, run.classes), 0)[0])
    begin = time.monotonic()
    with pytest.raises(SandmaskError, match=r"records\.jsonl:1 .*has 5,000,000 characters, and at most 1,000"):
        read_runs(tmp_path)
    assert time.monotonic() - begin < 20


def test_extreme_metrics_and_any_hyperparameters_make_a_page() -> None:
    run = made_up_run([[0.5, 0.5]] * 3, hparams={"lr": 0.1, "layers": [1, 2], "flag": True, "none": None})
    extreme = replace(run, metrics={"huge": np.array([1e308, -1e308, 1.0]), "tiny": np.array([5e-324, 0.0, np.inf])})
    assert "<html" in render_html([extreme], ["training-domain"])


def test_a_run_that_holds_out_everything_is_not_selected() -> None:
    cell = build_report([made_up_run([[0.5]], test_envs=[0])]).rules[0].datasets["Toy"].cells["ERM", "0"]
    assert cell.mean is None


@pytest.mark.parametrize("name", ["Avg", "all", "Averages", "", "-", "__proto__"])
def test_names_that_the_report_uses_itself_are_only_names(name: str) -> None:
    runs = [replace(run, env_names=(name, "b", "c")) for run in made_up_sweep(["ERM", "IRM"], dataset=name)]
    report = build_report([*runs, *made_up_sweep(["ERM", "IRM"], dataset="other")])
    for format_name in FORMATS:
        render(report, format_name)
    statistics = report.rules[0].statistics
    assert statistics is not None
    found = [item for item in statistics.comparisons if item.method == "IRM" and item.against_baseline is not None]
    assert sorted(item.against_baseline.pairs for item in found if item.against_baseline) == [6, 6, 12]
