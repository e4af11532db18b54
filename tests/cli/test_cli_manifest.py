"""A manifest in place of a dataset's name, in every command that takes one."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sandmask.cli._app import app


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three domains of eight images each; the class is the brightness."""
    rows = ["path,class,domain"]
    for number in range(24):
        label, domain = ("dark", "light")[number % 2], "abc"[number // 8]
        pixels = np.random.RandomState(number).randint(0, 60, (32, 32, 3)) + 190 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{label},{domain}")
    (tmp_path / "scans.csv").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "scans.csv"


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


SMALL = ("--steps", "3", "--hparam", "batch_size=2", "--network", "test_resnet", "--weights", "none", "--device", "cpu")


def test_train_predict_and_verify(manifest: Path) -> None:
    trained = json.loads(call("train", "scans.csv", "ERM", "--test-env", "b", *SMALL, "--out", "run", "--json"))
    assert set(trained["accuracy"]) == {"a", "b", "c"}
    assert trained["spec"]["dataset"].startswith("scans-")
    predicted = json.loads(call("predict", "run", "scans.csv", "--json"))
    assert [each["file"] for each in predicted] == [f"{number}.png" for number in range(24)]
    assert [each["class"] for each in predicted] == [
        each["class"] for each in json.loads(call("predict", "run", *[f"{n}.png" for n in range(24)], "--json"))
    ]
    checked = json.loads(call("data", "verify", "scans.csv", "--contents", "--json"))
    assert checked[0]["counts"] == {"a": 8, "b": 8, "c": 8}
    (manifest.parent / "3.png").write_bytes(b"no image")
    result = CliRunner().invoke(app, ["data", "verify", "scans.csv", "--contents"])
    assert result.exit_code == 1
    assert "3.png cannot be decoded" in result.stdout


def test_verify_accepts_missing_classes_as_training_does(manifest: Path) -> None:
    rows = manifest.read_text().splitlines()
    manifest.write_text("\n".join(row for row in rows if not row.endswith(",light,b")))
    refused = CliRunner().invoke(app, ["data", "verify", "scans.csv"])
    assert refused.exit_code == 1
    assert "--missing-classes" in refused.stdout
    checked = json.loads(call("data", "verify", "scans.csv", "--missing-classes", "--json"))
    assert checked[0]["counts"] == {"a": 8, "b": 4, "c": 8}


def test_a_sweep_runs_on_a_manifest(manifest: Path) -> None:
    asked = (
        "--datasets",
        "scans.csv",
        "--algorithms",
        "ERM",
        "--test-envs",
        "a",
        "--n-hparams",
        "1",
        "--n-trials",
        "1",
    )
    call("sweep", "run", "swept", *asked, "--workers", "1", *SMALL)
    assert f'datasets = ["{manifest}"]' in (manifest.parent / "swept" / "sweep.toml").read_text()
    assert "scans-" in call("report", "swept", "--format", "csv")
