"""The page as a file: it stands alone, is written whole, and says what is wrong."""

import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from sandmask.cli import report as report_module
from sandmask.cli._app import COMMANDS
from sandmask.cli.report import report
from sandmask.errors import SandmaskError
from sandmask.records import write_archive
from sandmask.records.testing import made_up_sweep
from sandmask.reports import build_report
from sandmask.reports.html import render_html, write_html


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_archive(made_up_sweep(["ERM", "SANDMask"]), tmp_path / "mine.records.parquet")
    return tmp_path / "mine.records.parquet"


def test_the_page_needs_nothing_else() -> None:
    page = render_html(made_up_sweep(["ERM"]))
    shown = page.replace("http://www.w3.org/2000/svg", "")  # the name of a format, not an address
    assert "http:" not in shown
    assert "https:" not in shown
    assert not re.search(r"\ssrc=|@import|url\(", shown)
    assert "default-src 'none'" in page
    assert "{{" not in page.replace("{{}}", "")


def test_every_asset_is_used() -> None:
    page = render_html(made_up_sweep(["ERM"]))
    for asset in files("sandmask.reports.html").joinpath("assets").iterdir():
        if asset.name != "page.html":
            assert asset.read_text(encoding="utf-8") in page, asset.name


def test_names_cannot_break_out() -> None:
    page = render_html(
        made_up_sweep(["</script><img src=x>"], dataset="<b>&"), title="</title><script>alert(1)</script>{{data}}"
    )
    assert "<img src=x>" not in page
    assert "<script>alert" not in page
    assert "&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;{{data}}" in page


def test_the_command_writes_a_page_and_prints_no_tables(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "out.html"
    result = run(store, "--html", target)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert re.search(r"Wrote .*out\.html \(\d\.\d MB, 48 runs, \d+ s\)\.", result.stderr)
    assert "<title>mine</title>" in target.read_text(encoding="utf-8")
    assert [path.name for path in target.parent.iterdir()] == ["out.html"]


def test_other_formats_are_what_they_are_without_a_page(store: Path, tmp_path: Path) -> None:
    alone = run(store, "--format", "json")
    both = run(store, "--format", "json", "--html", tmp_path / "out.html")
    assert both.stdout == alone.stdout
    assert (tmp_path / "out.html").exists()


def test_a_page_is_replaced_whole(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.html"
    target.write_text("old")

    def fail(*arguments: object, **settings: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sandmask.reports.html._page.render_html", fail)
    with pytest.raises(KeyboardInterrupt):
        write_html(made_up_sweep(["ERM"]), target)
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.records.parquet", "out.html"]


@pytest.mark.parametrize(
    ("place", "message"),
    [(".", "is a folder. Name the file to write"), ("mine.records.parquet/out.html", "cannot be written")],
)
def test_an_unwritable_place_is_told(store: Path, place: str, message: str) -> None:
    result = run(store, "--html", store.parent / place)
    assert isinstance(result.exception, SandmaskError)
    assert message in str(result.exception)


def test_mistakes_are_told(store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "There are no runs to report" in str(run(tmp_path / "empty", "--html", tmp_path / "x.html").exception)
    assert not (tmp_path / "x.html").exists()
    assert "add --html" in str(run(store, "--open").exception)
    assert "Did you mean 'oracle'" in str(run(store, "--html", tmp_path / "x.html", "--selection", "orakle").exception)


@pytest.mark.parametrize("found", [True, False])
def test_the_browser_is_asked_to_open_the_page(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    opened: list[str] = []

    def browser(address: str) -> bool:
        opened.append(address)
        return found

    monkeypatch.setattr("webbrowser.open", browser)
    result = run(store, "--html", tmp_path / "out file.html", "--open")
    assert opened == [(tmp_path / "out file.html").as_uri()]
    assert ("No browser was found" in result.stderr) is not found


def test_a_long_wait_is_announced(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "_MANY", 10)
    assert "48 runs: computing tables" in run(store, "--html", tmp_path / "out.html").stderr


def test_the_paper_may_be_left_out(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a guest: without it there is a page, no command for it, and no number to compare with."""
    for name in [name for name in sys.modules if name.startswith("sandmask.paper.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sandmask.paper", None)
    assert run(store, "--html", tmp_path / "page.html").exit_code == 0
    assert "paper" not in [command.name for command in COMMANDS if command.exists]
    with pytest.raises(SandmaskError, match="not installed"):
        build_report(made_up_sweep(["ERM"]), against_paper=True)
