"""The page on tables: its Python runs, and its commands and numbers are real."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from sandmask.cli.import_domainbed import import_domainbed
from sandmask.cli.report import report
from sandmask.selection import RULES

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_python_on_the_page_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    script = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Toy, model selection: low-loss" in done.stdout
    assert "88.0 2.9 3" in done.stdout
    assert "oracle Spirals SANDMask 91.1 91.4125" in done.stdout


def test_the_commands_on_the_page_have_their_options(page: str) -> None:
    functions: dict[str, Callable[..., None]] = {"report": report, "import-domainbed": import_domainbed}
    for name, rest in re.findall(r"^sandmask ([\w-]+) (.*)$", page, re.MULTILINE):
        app = typer.Typer()
        app.command()(functions[name])
        known = {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known


def test_the_page_lists_the_rules(page: str) -> None:
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(RULES)
