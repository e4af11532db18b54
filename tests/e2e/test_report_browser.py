"""What the page shows and does, in a real browser."""

import csv
import io
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import Grid, build_report, grids, run_command
from sandmask.reports._formats import latex, markdown
from sandmask.reports.html import write_html

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Open = Callable[..., "Page"]


def downloaded(page: "Page", button: "Locator") -> str:
    with page.expect_download() as info:
        button.click()
    return Path(info.value.path()).read_bytes().decode()


def first_column(page: "Page", table: int = 0) -> list[str]:
    shown: list[str] = page.locator("main table").nth(table).locator("tbody th").all_inner_texts()
    return shown


def grid_of(runs: list[RunRecord], title: str, rule: str, *, against_paper: bool = False) -> Grid:
    report = build_report(runs, [rule], against_paper=against_paper)
    return next(grid for grid in grids(report) if grid.title.startswith(f"{title}, "))


def test_the_overview_says_what_was_run_what_is_best_and_what_is_missing(visit: Open, runs: list[RunRecord]) -> None:
    page = visit()
    words = page.inner_text("main")
    assert f"{len(runs)}\nruns" in words
    assert "unfinished" in words
    assert "diverged" in words
    averages = grid_of(runs, "Averages", "oracle")
    pacs = averages.header.index("PACS")
    ranked = [row for row in averages.rows if re.match(r"\d+\.", row[pacs]) and "environments" not in row[pacs]]
    best = max(ranked, key=lambda row: float(row[pacs].split()[0].rstrip("†")))
    cell = page.locator("tr", has_text="PACS").locator("a.best").nth(2)
    assert cell.inner_text().split("\n")[0] == f"{best[0]} {best[pacs]}"
    assert "missing: trial 0 draw 1 (at step 600 of 601)" in (page.locator("section").last.text_content() or "")
    cell.click()
    page.wait_for_selector("body[data-view=tables]")
    assert "rule=oracle" in page.url


def test_the_overview_of_one_held_out_environment_says_what_its_average_is_over(visit: Open, tmp_path: Path) -> None:
    some = [run for run in made_up_sweep(["ERM", "IRM"]) if run.spec.test_envs == (0,)]
    page = visit(target=write_html(some, tmp_path / "some.html").as_uri())
    assert "(1/3 environments)" in page.locator("a.best").first.inner_text()


def test_the_best_number_is_bold_unless_it_ties_or_is_at_chance(visit: Open, tmp_path: Path) -> None:
    def runs(algorithm: str, *accuracies: float) -> list[RunRecord]:
        return [
            made_up_run([[accuracy] * 3], test_envs=[env], algorithm=algorithm)
            for env, accuracy in enumerate(accuracies)
        ]

    made = [*runs("ERM", 0.9, 0.7, 0.5), *runs("IRM", 0.8, 0.7, 0.4)]  # better, a tie, at chance of two classes
    page = visit("tables?dataset=Toy", target=write_html(made, tmp_path / "bold.html", ["oracle"]).as_uri())
    assert page.locator("tbody strong").all_inner_texts() == ["90.0", "70.0"]  # the second is the average
    assert "above chance" in page.inner_text("main")


def test_a_table_that_goes_on_says_so_on_a_phone(visit: Open) -> None:
    page = visit("tables?dataset=PACS", width=390)
    frame = page.locator(".frame").first
    words = page.locator(".goes-on-words").first
    assert words.is_visible()
    assert "goes-on" in (frame.get_attribute("class") or "")
    page.locator(".scroll").first.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    page.wait_for_selector(".frame.at-end")
    wide = visit("tables?dataset=PACS", width=1600)
    assert not wide.locator(".goes-on-words").first.is_visible()


def test_tables_show_the_words_of_the_text_report(visit: Open, runs: list[RunRecord]) -> None:
    page = visit("tables?rule=training-domain")
    for number, title in enumerate(["PACS", "<img src=x> -5 ±|", "Averages"]):
        grid = grid_of(runs, title, "training-domain")
        shown = page.locator("main table").nth(number).locator("tbody tr").all()
        for row, words in zip(shown, grid.rows, strict=True):
            cells = row.locator("th, td").all_inner_texts()
            assert [" ".join(cell.split()) for cell in cells] == list(words)


def test_a_heading_sorts_and_the_address_remembers(visit: Open, runs: list[RunRecord]) -> None:
    page = visit("tables?dataset=PACS")
    before = first_column(page)
    heading = page.get_by_role("button", name="C", exact=True)
    heading.click()
    rows = {row[0]: float(row[2].split()[0].rstrip("†")) for row in grid_of(runs, "PACS", "training-domain").rows}
    downwards = sorted(rows, key=lambda name: -rows[name])
    assert first_column(page) == downwards
    assert page.locator("th[aria-sort=descending]").count() == 1
    heading.click()
    assert first_column(page) == downwards[::-1]
    page.reload()
    page.wait_for_selector("body[data-drawn]")
    assert first_column(page) == downwards[::-1]
    page.get_by_role("button", name="C", exact=True).click()
    assert first_column(page) == before


def test_methods_can_be_filtered(visit: Open) -> None:
    page = visit("tables?dataset=PACS")
    search = page.get_by_label("Methods")
    search.fill("mask")
    assert first_column(page) == ["ANDMask", "SANDMask"]
    search.fill("irm, sand")
    assert first_column(page) == ["IRM", "SANDMask"]
    search.fill("nothing")
    assert "No method matches" in page.inner_text("main")


def test_the_selection_rule_changes_every_number(visit: Open, runs: list[RunRecord]) -> None:
    page = visit("tables?dataset=PACS")
    page.get_by_label("Model selection", exact=True).select_option("oracle")
    page.get_by_role("heading", name="PACS, model selection: oracle").wait_for()
    shown = page.locator("tbody tr").first.locator("td").all_inner_texts()
    expected = grid_of(runs, "PACS", "oracle").rows[0]
    assert [" ".join(cell.split()) for cell in shown] == list(expected[1:])
    page.get_by_role("link", name="Comparisons").click()
    page.wait_for_selector("body[data-view=comparisons]")
    assert "rule=oracle" in page.url
    assert "Compared with ERM, model selection: oracle" in page.inner_text("main")


def test_a_method_without_runs_on_a_dataset_is_missing(visit: Open, tmp_path: Path) -> None:
    runs = [*made_up_sweep(["IRM"], dataset="Zoo"), *made_up_sweep(["ERM", "IRM"])]
    page = visit(target=write_html(runs, tmp_path / "some.html").as_uri())
    missing = page.locator("section").last.inner_text()
    assert "some methods have none on some datasets" in missing
    assert "Zoo: no runs of ERM." in missing
    assert first_column(page) == ["Toy", "Zoo"]  # in the order of the tables


@pytest.mark.paper
def test_the_papers_numbers_are_a_switch(visit: Open, runs: list[RunRecord]) -> None:
    page = visit("tables?dataset=PACS")
    assert page.locator(".paper").count() == 0
    page.get_by_label(re.compile("The paper.s numbers")).check()
    expected = grid_of(runs, "PACS", "training-domain", against_paper=True)
    cells = page.locator("tbody tr").nth(3).locator("td").all_inner_texts()
    assert [" ".join(cell.split()) for cell in cells] == list(expected.rows[3][1:])
    page.reload()
    page.wait_for_selector("body[data-drawn]")
    assert page.locator(".paper").count() > 0


def test_intervals_are_a_switch_where_there_are_enough_trials(visit: Open, tmp_path: Path) -> None:
    assert visit("tables?dataset=PACS").get_by_label("95% intervals").count() == 0  # three trials
    runs = made_up_sweep(["ERM", "IRM"], trials=6)
    page = visit("tables?dataset=Toy", target=write_html(runs, tmp_path / "six.html", ["training-domain"]).as_uri())
    assert page.get_by_label(re.compile("The paper.s numbers")).count() == 0  # it has none of this dataset
    page.get_by_label("95% intervals").check()
    low, high = build_report(runs).rules[0].datasets["Toy"].cells["ERM", "0"].interval or (0, 0)
    assert f"{low:.1f} to {high:.1f}" in page.locator("tbody tr").first.locator("td").first.inner_text()


@pytest.mark.parametrize("paper", ["0", pytest.param("1", marks=pytest.mark.paper)])
def test_tables_download_as_the_other_formats_write_them(visit: Open, runs: list[RunRecord], paper: str) -> None:
    page = visit(f"tables?paper={paper}&rule=oracle")
    for number, title in enumerate(["PACS", "<img src=x> -5 ±|", "Averages"]):
        grid = grid_of(runs, title, "oracle", against_paper=paper == "1")
        box = page.locator(".table").nth(number)
        assert downloaded(page, box.get_by_role("button", name="LaTeX")) == latex([grid])
        assert downloaded(page, box.get_by_role("button", name="Markdown")) == markdown([grid])
    rows = list(csv.DictReader(io.StringIO(downloaded(page, page.get_by_role("button", name="CSV").first))))
    cell = build_report(runs, ["oracle"]).rules[0].datasets["PACS"].cells["IRM", "P"]
    (found,) = [row for row in rows if (row["method"], row["column"]) == ("IRM", "P")]
    assert float(found["mean"]) == cell.mean
    assert float(found["standard_error"]) == cell.error


def test_a_cell_leads_to_its_runs_and_their_curves(visit: Open, runs: list[RunRecord]) -> None:
    page = visit("tables?dataset=PACS")
    page.locator("tbody tr").nth(3).locator("td button").first.click()
    dialog = page.locator("dialog[open]")
    assert "SANDMask, PACS A" in dialog.inner_text()
    cell = build_report(runs, ["training-domain"]).rules[0].datasets["PACS"].cells["SANDMask", "A"]
    selected = cell.trials[0].selected
    assert selected is not None
    assert f"{100 * selected.test_accuracy:.2f}" in dialog.inner_text()
    dialog.locator("a").first.click()
    page.wait_for_selector("body[data-view=run]")
    assert selected.run.spec.id in page.inner_text("main")
    words = downloaded(page, page.get_by_role("button", name="Download CSV: Accuracy over training"))
    rows = list(csv.DictReader(io.StringIO(words)))
    assert [int(row["step"]) for row in rows] == selected.run.steps.tolist()
    held_out = [float(row["A (held out), “in”"]) for row in rows]
    np.testing.assert_allclose(held_out, selected.run.accuracy_in[:, 0], atol=0.51e-4)
    page.go_back()
    page.wait_for_selector("body[data-view=tables]")


def test_mask_diagnostics_are_shown_where_there_are_some(visit: Open, runs: list[RunRecord]) -> None:
    ids = {run.spec.algorithm: run.spec.id for run in runs if run.spec.dataset == "PACS"}
    page = visit(f"run?id={ids['SANDMask']}")
    assert "Mask diagnostics" in page.inner_text("main")
    page.get_by_label("Tensor").select_option("classifier.bias")
    words = downloaded(page, page.get_by_role("button", name="Download CSV: Dead fraction over training"))
    assert words.splitlines()[0] == "step,all,featurizer.layers.0.weight,classifier.bias"
    page.get_by_label("Checkpoint").fill("2")
    assert "step 200" in page.inner_text("main")
    page.goto(page.url.split("#")[0] + f"#/run?id={ids['ERM']}")
    page.get_by_text(ids["ERM"]).wait_for()
    assert "Mask diagnostics" not in page.inner_text("main")


@pytest.mark.parametrize(
    ("view", "count"), [("comparisons?scope=PACS", 2), ("hyperparameters?dataset=PACS&method=IRM", 1), ("regret", 1)]
)
def test_figures_download_as_pictures_and_numbers(visit: Open, view: str, count: int) -> None:
    page = visit(view)
    figures = page.locator("figure")
    assert figures.count() == count
    for number in range(count):
        drawing = downloaded(page, figures.nth(number).get_by_role("button", name="SVG"))
        root = ET.fromstring(drawing.split("\n", 1)[1])
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter())) > 15
        assert "NaN" not in drawing
        rows = list(csv.reader(io.StringIO(downloaded(page, figures.nth(number).get_by_role("button", name="CSV")))))
        assert len(rows) > 1


def test_runs_can_be_found_and_opened_from_a_plot(visit: Open, runs: list[RunRecord]) -> None:
    page = visit("runs")
    assert f"{len(runs)} rows" in page.inner_text("main")
    page.get_by_label("Status").select_option("diverged")
    assert page.locator("tbody tr").count() == 1
    page.locator("tbody a").click()
    page.wait_for_selector("body[data-view=run]")
    assert "Diverged at step 650." in page.inner_text("main")
    page.goto(page.url.split("#")[0] + "#/hyperparameters?dataset=PACS&method=IRM")
    plot = page.get_by_role("group", name="lr against")
    plot.locator("svg").wait_for()  # drawn once its place has a size
    plot.focus()
    plot.press("ArrowRight")
    assert "trial" in page.locator(".tip").inner_text()
    plot.press("Enter")
    page.wait_for_selector("body[data-view=run]")


def test_a_pruned_run_can_be_opened_and_datasets_are_listed_in_order(visit: Open, tmp_path: Path) -> None:
    made = [made_up_run([[0.5] * 3], dataset=f"Toy-{size}", status="pruned") for size in (16, 4)]
    page = visit("runs", target=write_html(made, tmp_path / "pruned.html").as_uri())
    assert page.get_by_label("Dataset").locator("option").all_inner_texts() == ["Any", "Toy-4", "Toy-16"]
    page.locator("tbody a").first.click()
    page.wait_for_selector("body[data-view=run]")
    assert "Pruned, step 0 of 0." in page.inner_text("main")
    page.get_by_role("link", name="Overview").click()
    page.wait_for_selector("body[data-view=overview]")
    assert "2\npruned" in page.inner_text("main")


def test_metrics_changes_and_commands_are_shown(visit: Open, tmp_path: Path) -> None:
    def measured(runs: list[RunRecord]) -> list[RunRecord]:
        for run in runs:
            run.metrics.update(
                {f"f1/{split}/{e}": run.accuracy_in[:, e] / 2 for split in ("in", "out") for e in range(3)}
            )
        return [
            replace(run, tables={"confusion": np.tile(np.arange(24), (len(run.steps), 1))}, metrics=run.metrics)
            for run in runs
        ]

    now, before = measured(made_up_sweep(["ERM", "IRM"])), measured(made_up_sweep(["ERM"], seed=3))
    settings: dict[str, Any] = {"metrics": ["f1", "confusion"], "earlier": before}
    target = write_html(now, tmp_path / "more.html", ["training-domain"], **settings).as_uri()
    page = visit("tables?dataset=Toy", target=target)
    report = build_report(now, metrics=["f1", "confusion"], earlier=before)
    words = {grid.title.split(", model")[0]: grid for grid in grids(report)}

    def shown(title: str) -> None:
        first = page.locator("tbody tr").first.locator("th, td").all_inner_texts()
        assert [" ".join(cell.split()) for cell in first] == list(words[title].rows[0])

    shown("Toy")
    assert "[was " in page.inner_text("tbody")
    page.get_by_label("Metric").select_option("f1")
    page.get_by_role("heading", name="Toy, Macro-F1").wait_for()
    shown("Toy, Macro-F1")
    page.get_by_label("Metric").select_option("confusion")
    page.get_by_role("heading", name="Confusion of ERM").wait_for()
    shown("Toy, Confusion of ERM")
    page.goto(f"{target}#/comparisons")
    page.get_by_role("heading", name="Compared with before").wait_for()
    shown("Compared with before")
    run = now[5]
    page.goto(f"{target}#/run?id={run.spec.id}")
    page.get_by_role("heading", name="Train it again").wait_for()
    expected = run_command(run)
    found = page.inner_text(".command code")
    assert [_plain(word) for word in shlex.split(found)] == [_plain(word) for word in shlex.split(expected)]
    page.get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("getSelection().toString()") == found


def test_ranks_say_why_methods_are_left_out(visit: Open, tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "IRM"], draws=1)
    runs += [run for run in made_up_sweep(["VREx"], draws=1) if run.spec.test_envs != (0,)]
    runs += made_up_sweep(["ERM"], draws=1, seed=1, options={"soup": "greedy"})
    page = visit("comparisons", target=write_html(runs, tmp_path / "page.html", ["oracle"]).as_uri())
    words = page.inner_text("main")
    assert "runs are missing: VREx. Soups, ensembles and adapted models are not ranked." in words


def _plain(word: str) -> str | tuple[str, float]:
    """A word; of a hyperparameter, the number that it is."""
    name, equals, value = word.partition("=")
    return (name, float(value)) if equals else word
