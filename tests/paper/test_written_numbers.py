"""Numbers that the documentation quotes equal the archives."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "results" / "paper"


@pytest.fixture(scope="module")
def quoted() -> ModuleType:
    """The script results/paper/quoted.py."""
    spec = importlib.util.spec_from_file_location("quoted", PAPER / "quoted.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quoted_numbers_are_those_of_the_archives(quoted: ModuleType) -> None:
    try:
        numbers = quoted.numbers()
    finally:
        quoted.archive.cache_clear()  # the archives are large
    assert quoted.FILE.read_text(encoding="utf-8") == numbers, "run: python results/paper/quoted.py"


def test_every_quoted_number_is_shown_somewhere(quoted: ModuleType) -> None:
    pages = [page.read_text(encoding="utf-8") for page in [*(ROOT / "docs").rglob("*.md"), PAPER / "notes.md"]]
    names = [name for page in pages for name in re.findall(r'<data value="paper/quoted / ([^"]+)"', page)]
    shown = {" ".join(name.split()) for name in names}
    section = quoted.FILE.read_text(encoding="utf-8").split("\n## ")
    named = [part for part in section if "| what | value |" in part]
    rows = {row for part in named for row in re.findall(r"^\| (.+) \| [^|]+ \|$", part, re.MULTILINE)} - {"what"}
    assert rows == {name for name in shown if " / " not in name}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "paper").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_means_with_errors_are_those_of_results(page: Path) -> None:
    with_error = re.compile(r"\d+\.\d+ ± \d+\.\d+")
    recipe = ROOT / "docs" / "masks-that-work.md"  # tests/test_recipe.py compares its table with the records
    texts = [file.read_text(encoding="utf-8") for file in [*(ROOT / "results").rglob("*.md"), recipe]]
    known = {found for text in texts for found in with_error.findall(text)}
    assert set(with_error.findall(page.read_text(encoding="utf-8"))) <= known
