"""`sandmask demo`, cut short."""

from pathlib import Path

from PIL import Image
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.records import read_runs


def test_demo_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 0, result.output
    for method in ("ERM", "ANDMask-rescaled", "SANDMask"):
        assert method in result.stdout
    with Image.open(tmp_path / "demo" / "demo.png") as picture:
        assert picture.width > 2 * picture.height
    assert len(read_runs(tmp_path / "demo")) == 6
    again = CliRunner().invoke(app, ["demo", "--steps", "2", "--out", str(tmp_path / "demo")])
    assert again.exit_code == 2
    assert "is not empty" in again.stderr
