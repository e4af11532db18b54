"""The page "Masks that work": its tables are those of the records, and the recipe trains out of the box."""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sandmask.algorithms import ALGORITHMS
from sandmask.hparams import DEFAULT_SPACE, resolve, space_for
from sandmask.records import read_runs, write_archive
from sandmask.records.testing import made_up_sweep

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "masks-that-work.md"


def script(name: str, folder: str = "recipe") -> ModuleType:
    """A script beside the records."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "results" / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "results" / "recipe"))
    tables = script("table")
    made = {
        "recipe": tables.table("training-domain"),
        "changes": tables.changes_table(),
        "forgetting": tables.forgetting_table(),
        "images": tables.images_table("training-domain"),
        "watermarks": tables.watermarks_table("training-domain"),
        "domains": tables.domains_table("training-domain"),
        "other methods": tables.other_methods_table("training-domain"),
    }
    text = "".join(page.read_text(encoding="utf-8") for page in (PAGE, ROOT / "results" / "recipe" / "README.md"))
    for name, table in made.items():
        shown = text.split(f"<!-- {name} table -->\n")[1].split("\n<!-- end -->")[0]
        assert shown == table, name


def test_the_tables_of_all_methods_are_those_of_the_records() -> None:
    tables = script("table", "methods")
    assert (ROOT / "results" / "methods" / "table.md").read_text(encoding="utf-8") == tables.page()
    rows = tables.table(ROOT / "results" / "recipe" / "pacs.records.parquet", "PACS").splitlines()
    assert rows[0].startswith("| method | mean | A | C | mean, worst domain |")
    assert {row.split(" | ")[0] for row in rows[2:]} == {"| ERM", "| ERM + SMA", "| ERM + EMA", "| ERM + SWAD"}


def test_an_archive_keeps_the_runs_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kept" / "all.records.parquet"
    file.parent.mkdir()

    def archive(folder: Path) -> None:
        monkeypatch.setattr(sys, "argv", ["archive.py", str(folder), str(file)])
        runpy.run_path(str(ROOT / "results" / "methods" / "archive.py"), run_name="__main__")

    with pytest.raises(SystemExit, match=r"No run in .* is finished"):
        archive(tmp_path)
    assert not file.exists()
    for algorithm in ("ERM", "IRM"):
        (tmp_path / algorithm).mkdir()
        write_archive(made_up_sweep([algorithm]), tmp_path / algorithm / "a.records.parquet")
        archive(tmp_path / algorithm)
    assert {run.spec.algorithm for run in read_runs(file)} == {"ERM", "IRM"}


def test_no_mask_trains_nothing_by_default() -> None:
    assert DEFAULT_SPACE == "recipe"
    masks = [entry for entry in ALGORITHMS.values() if any(row.name == "tau" for row in entry.hparams)]
    assert len(masks) >= 6
    for entry in masks:
        for scope, dataset in (("tabular", "Spirals"), ("small-image", "ColoredMNIST"), ("image", "PACS")):
            values = resolve(space_for(scope, dataset, entry.name, entry.hparams))
            assert values["tau"] == 0.9
            assert entry.caution(values) is None
