"""The tables in results/diagnostics, which docs/diagnostics.md shows, are what the records give."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from sandmask.records import read_runs

RECORDS = Path(__file__).parents[2] / "results" / "diagnostics"
FILES = ("spirals-seed-1", "spirals-seed-2", "spirals-seed-3", "colored_mnist")


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_rules", RECORDS / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_records(compare: ModuleType) -> None:
    tables = compare.tables(RECORDS / f"{name}.records.parquet" for name in FILES)
    assert (RECORDS / "tables.md").read_text(encoding="utf-8") == tables


def test_what_else_is_computed(compare: ModuleType) -> None:
    runs = read_runs(RECORDS / "colored_mnist.records.parquet")
    assert compare.worth(compare.choose(runs)).startswith("15 choices: 9 at a likelihood of 0.505 or less")
    lines = [line for env in (0, 1) for line in compare.separation([r for r in runs if r.spec.test_envs == (env,)])]
    assert sum(int(line.split()[2]) for line in lines if "over 60%" in line) == 1926


def test_the_picture_can_be_drawn(compare: ModuleType, tmp_path: Path) -> None:
    runs = [r for r in read_runs(RECORDS / "colored_mnist.records.parquet") if r.spec.test_envs == (1,)]
    compare.draw({"+80% held out": runs}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
