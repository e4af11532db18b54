"""`sandmask demo`, cut short."""

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from sandmask.cli import demo as demo_module
from sandmask.cli._app import app
from sandmask.records import read_runs


def test_demo_prints_a_table_and_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "WORKERS", 1)  # no processes to start
    out = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for title in demo_module.TITLES.values():
        assert title in result.stdout
    with Image.open(out / "demo.png") as picture:
        assert picture.width > 2 * picture.height
    runs = read_runs(out)
    assert len(runs) == 3 * demo_module.DRAWS
    assert {(run.spec.dataset, run.spec.space, run.spec.test_envs) for run in runs} == {
        ("Spirals:seed=3", "recipe", (0,))
    }
    again = CliRunner().invoke(app, ["demo", "--steps", "2", "--out", str(out)])
    assert again.exit_code == 0
    assert result.stdout.splitlines()[1:-1] == again.stdout.splitlines()[1:-1]  # nothing was trained anew
    other = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(out)])
    assert other.exit_code == 2
    assert "steps is 2 there, but 3 was requested" in other.stderr
