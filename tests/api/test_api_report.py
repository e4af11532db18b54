"""`sandmask.report` and `sandmask.predict`: tables and predictions as frames."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sandmask
from sandmask.reports import render

SMALL: dict[str, Any] = {"steps": 3, "hparams": {"mlp_width": 8, "batch_size": 8}, "device": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for env in ("a", "b", "c"):
        for algorithm in ("ERM", "ANDMask"):
            sandmask.train("DebugVector", algorithm, env, out=folder / f"{algorithm}-{env}", **SMALL)
    return folder


def test_a_report_is_text_a_frame_and_a_page(runs: Path, tmp_path: Path) -> None:
    tables = sandmask.report(runs)
    assert str(tables) == render(tables, "text")
    frame = tables.frame()
    assert set(frame["selection"]) == {"training-domain", "oracle"}
    assert frame["mean"].notna().all()
    csv = render(tables, "csv").splitlines()
    assert len(frame) == len(csv) - 1
    assert ",".join(frame.columns) == csv[0]
    assert "<h4>DebugVector, model selection: oracle</h4>" in tables._repr_html_()
    page = tables.to_html(tmp_path / "report.html", ["oracle"], title="Mine")
    assert "<title>Mine" in page.read_text()


def test_a_page_does_not_replace_records(runs: Path) -> None:
    records = runs / "ERM-a" / "records.jsonl"
    before = records.read_bytes()
    with pytest.raises(sandmask.SandmaskError, match="named like a file of records"):
        sandmask.report(runs).to_html(records)
    assert records.read_bytes() == before


def test_several_folders_and_rules(runs: Path) -> None:
    together = sandmask.report([runs / "ERM-a", runs / "ANDMask-a"], "oracle")
    assert together.runs == 2
    assert {rule.rule for rule in together.rules} == {"oracle"}
    assert len(sandmask.report(runs, "oracle,training-domain").rules) == 2
    assert len(sandmask.report(runs, "all").rules) > 2
    with pytest.raises(sandmask.SandmaskError, match="Did you mean 'oracle'"):
        sandmask.report(runs, "orakle")
    with pytest.raises(sandmask.SandmaskError, match="does not exist"):
        sandmask.report([runs, runs / "nowhere"])


def test_predictions_are_a_frame(runs: Path, tmp_path: Path) -> None:
    trained = sandmask.load_run(runs / "ERM-a")
    points = tmp_path / "points.npy"
    x = np.random.default_rng(0).normal(size=(4, *trained.input_shape)).astype("float32")
    np.save(points, x)
    found = sandmask.predict(runs / "ERM-a", points, top=2, device="cpu")
    assert list(found.columns) == ["file", "row", "rank", "class", "probability"]
    assert found["row"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[found["rank"] == 1]["class"].tolist() == trained.classify(x)
    with pytest.raises(sandmask.SandmaskError, match="There is no file"):
        sandmask.predict(trained, [points, tmp_path / "nowhere.npy"])
    with pytest.raises(sandmask.SandmaskError, match="top should be at least 1"):
        sandmask.predict(trained, points, top=0)
