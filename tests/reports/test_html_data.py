"""What goes into the page: the numbers of the text report, and curves that can be decoded again."""

import base64
import json
import re
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sandmask.records import RunRecord, average_metrics
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import Grid, build_report, render
from sandmask.reports._formats import latex, markdown, text
from sandmask.reports.html import render_html
from sandmask.reports.html._curves import FULL, MISSING, SUMMARY, choose_detail, codes_blob, kept_points, run_curves
from sandmask.reports.html._page import regrets
from sandmask.selection import RULES


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    found = made_up_sweep(["ERM", "SANDMask"], environments=4, draws=3, trials=2, dataset="PACS", pairs=True)
    found = [replace(run, env_names=("A", "C", "P", "S")) for run in found]
    found[0] = replace(found[0], status="diverged", diverged_at=250)
    found[1] = replace(found[1], status="running")
    return found + made_up_sweep(["ERM", "IRM"], dataset="50%_set & more", checkpoints=150, seed=1)


def blobs(page: str) -> dict[str, bytes]:
    found = re.findall(r'<script type="application/octet-stream" id="data-([\w-]+)">([^<]*)</script>', page)
    return {name: zlib.decompress(base64.b64decode(content)) for name, content in found}


def decode(content: bytes) -> tuple[Any, NDArray[np.int64]]:
    """The slow twin of the page's decoder: the header, and the changes in the order they were written."""
    length = int.from_bytes(content[:4], "little")
    planes = np.frombuffer(content[4 + length :], np.uint8).reshape(2, -1).astype(np.int64)
    folded = planes[0] | planes[1] << 8
    return json.loads(content[4 : 4 + length]), (folded >> 1) ^ -(folded & 1)


def decoded_curves(page: str) -> list[dict[str, Any]]:
    """Every run's steps and curves, as the page would show them."""
    result = []
    for name, content in blobs(page).items():
        if not name.startswith("curves-"):
            continue
        header, changes = decode(content)
        at = 0
        for entry in header:
            run: dict[str, Any] = {"steps": entry["steps"]}
            for curve, low, high, levels, log in entry["curves"]:
                codes = np.cumsum(changes[at : at + len(entry["steps"])]) & 0xFFFF
                at += len(entry["steps"])
                share = codes / levels
                values = low * (high / low) ** share if log else low + share * (high - low)
                run[curve] = np.where(codes == MISSING, np.nan, values)
            result.append(run)
        assert at == len(changes)
    return result


def test_an_average_is_a_method_but_no_further_run() -> None:
    names = average_metrics("sma", 3)
    runs = made_up_sweep(["ERM"], metrics=names, options={"averages": "sma"})
    counts = json.loads(blobs(render_html(runs))["report"])["overview"]
    (dataset,) = counts["datasets"].values()
    assert counts["methods"] == dataset["methods"] == 2
    assert counts["runs"] == dataset["runs"] == sum(counts["status"].values()) == build_report(runs).runs == len(runs)


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.paper)])
def test_the_words_are_those_of_the_other_formats(runs: list[RunRecord], beside: bool) -> None:
    words = json.loads(blobs(render_html(runs))["report"])["words"]
    tables = [table["paper"] if beside else table for found in words.values() for table in found.values()]
    grids = [
        Grid(t["title"], tuple(t["header"]), tuple(tuple(row) for row in t["rows"]), tuple(t["notes"])) for t in tables
    ]
    report = build_report(runs, list(RULES), against_paper=beside)
    assert text(grids) == render(report, "text")
    assert markdown(grids) == render(report, "markdown")
    assert latex(grids) == render(report, "latex")


@pytest.mark.paper
def test_the_numbers_are_those_of_the_json_format(runs: list[RunRecord]) -> None:
    page = render_html(runs, ["oracle"], baseline="SANDMask", draws=5, trials=4)
    report = build_report(runs, ["oracle"], against_paper=True, baseline="SANDMask", draws=5, trials=4)
    assert json.loads(blobs(page)["report"])["report"] == json.loads(render(report, "json"))


def test_statistics_can_be_left_out(runs: list[RunRecord]) -> None:
    content = json.loads(blobs(render_html(runs, statistics=False))["report"])
    assert all(entry["statistics"] is None for entry in content["report"]["selections"])
    assert not any("statistics" in tables for tables in content["words"].values())


def test_every_run_is_there_with_what_rules_take_of_it(runs: list[RunRecord]) -> None:
    content = json.loads(blobs(render_html(runs))["runs"])
    assert content["columns"]["id"] == [run.spec.id for run in runs]
    for place, run in enumerate(runs):
        assert content["hparams"][content["columns"]["hparams"][place]] == run.spec.hparams
        offer = content["offers"]["training-domain"]
        if run.status == "running" or len(run.spec.test_envs) > 1:
            assert offer["test"][place] is None
            continue
        best = int(run.accuracy_out[:, run.train_envs].mean(axis=1).argmax())
        assert offer["step"][place] == run.steps[best]
        assert offer["test"][place] == pytest.approx(100 * run.accuracy_in[best, run.spec.test_envs[0]], abs=1e-4)


def test_curves_are_the_records_to_a_hundredth_of_a_percent(runs: list[RunRecord]) -> None:
    found = decoded_curves(render_html(runs))
    assert len(found) == len(runs)
    for run, curves in zip(runs, found, strict=True):
        kept = np.searchsorted(run.steps, curves["steps"])
        assert min(len(run.steps), FULL.points - len(RULES)) <= len(kept) <= FULL.points
        for env in range(len(run.env_names)):
            np.testing.assert_allclose(curves[f"in/{env}"], run.accuracy_in[kept, env], atol=0.5001e-4)
            np.testing.assert_allclose(curves[f"out/{env}"], run.accuracy_out[kept, env], atol=0.5001e-4)
        np.testing.assert_allclose(curves["loss"], run.metrics["loss"][kept], atol=1e-3)


def test_checkpoints_that_a_rule_takes_are_kept(runs: list[RunRecord]) -> None:
    page = render_html(runs)
    offers = json.loads(blobs(page)["runs"])["offers"]
    for place, curves in enumerate(decoded_curves(page)):
        for offer in offers.values():
            assert offer["step"][place] is None or offer["step"][place] in curves["steps"]


@given(st.integers(1, 700), st.data())
def test_thinning_keeps_the_ends_and_what_is_asked_for(count: int, data: st.DataObject) -> None:
    taken = data.draw(st.lists(st.integers(0, count - 1), max_size=4))
    kept = kept_points(count, taken, 101)
    assert len(kept) <= 101
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert set(taken) <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    if count <= 101:
        assert len(kept) == count


@given(st.lists(st.lists(st.integers(0, 0xFFFF), min_size=3, max_size=3), max_size=5))
def test_codes_of_any_size_come_back(rows: list[list[int]]) -> None:
    codes = np.array(rows, dtype=np.uint16).reshape(-1, 3)
    header, changes = decode(zlib.decompress(base64.b64decode(codes_blob({"x": 1}, [codes]))))
    assert header == {"x": 1}
    np.testing.assert_array_equal(np.cumsum(changes.reshape(-1, 3), axis=1) & 0xFFFF, codes)


def test_metrics_keep_gaps_and_wide_ranges() -> None:
    run = made_up_run([[0.5, 0.5]] * 5)
    run.metrics["loss"] = np.array([1e6, 1.0, np.nan, np.inf, 1e-3])
    run.metrics["flat"] = np.full(5, 0.25)
    run.metrics["never"] = np.full(5, np.nan)
    (found,) = decoded_curves(render_html([run]))
    np.testing.assert_allclose(found["loss"], [1e6, 1.0, np.nan, np.nan, 1e-3], rtol=2e-3)
    np.testing.assert_array_equal(found["flat"], np.full(5, 0.25))
    assert np.isnan(found["never"]).all()


def test_a_large_store_keeps_summaries() -> None:
    run = made_up_run([[0.1, 0.5, 0.9]], test_envs=(1,))
    run.metrics.update(
        {"mask_density/all": np.ones(1), "mask_density/a.weight": np.ones(1), "agreement/all/3": np.ones(1)}
    )
    assert choose_detail([run]) is FULL
    assert choose_detail([run] * 10, largest=99) is SUMMARY
    curves = {curve.name: curve.values.tolist() for curve in run_curves(run, np.array([0]), SUMMARY)}
    assert curves == {
        "in/1": [0.5],
        "out/1": [0.5],
        "in/train": [0.5],
        "out/train": [0.5],
        "out/worst": [0.1],
        "loss": [1.0],
        "mask_density/all": [1.0],
        "agreement/all/3": [1.0],
    }


def test_regret_is_the_oracle_minus_the_selected(runs: list[RunRecord]) -> None:
    report = build_report(runs, list(RULES))
    by_rule = {rule.rule: rule for rule in report.rules}
    entries = {(e["rule"], e["dataset"], e["method"]): e for e in regrets(report)}
    assert ("oracle", "PACS", "ERM") not in entries
    entry = entries["training-domain", "PACS", "SANDMask"]
    differences = []
    for column in "ACPS":
        ours = by_rule["training-domain"].datasets["PACS"].cells["SANDMask", column].values
        best = by_rule["oracle"].datasets["PACS"].cells["SANDMask", column].values
        differences.append(np.mean(np.subtract(best, ours)))
        assert entry["environments"][column] == pytest.approx(differences[-1])
    assert entry["mean"] == pytest.approx(np.mean(differences))
    assert entry["pairs"] == 8
    assert regrets(build_report(runs, ["training-domain"])) == []
