"""What docs/diagnostics.md says about the rule is what its records give."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from sandmask.records import read_runs

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "diagnostics"
PAGE = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_rules", RECORDS / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "rows"), [("spirals-seed-1", 8), ("spirals-seed-2", 3), ("spirals-seed-3", 8), ("colored_mnist", 9)]
)
def test_the_page_has_the_tables_that_the_records_give(compare: ModuleType, file: str, rows: int) -> None:
    runs = read_runs(RECORDS / f"{file}.records.parquet")
    table = list(compare.table(compare.choose(runs), runs[0].env_names))
    assert len(table) == rows + 2
    earlier = file in (
        "spirals-seed-1",
        "spirals-seed-2",
    )  # of these the page shows one method, with the seed before it
    shown = [f"| {file[-1]} {row}" for row in table if "ANDMask-rescaled" in row] if earlier else table
    for row in shown:
        assert f"\n{row}\n" in PAGE, row


def test_the_page_quotes_what_else_is_computed(compare: ModuleType) -> None:
    runs = read_runs(RECORDS / "colored_mnist.records.parquet")
    assert "9 at a likelihood of 0.505 or less" in compare.worth(compare.choose(runs))
    assert "on ColoredMNIST 9 of 15 choices do" in PAGE.replace("\n   ", " ")
    lines = [line for env in (0, 1) for line in compare.separation([r for r in runs if r.spec.test_envs == (env,)])]
    good = [int(line.split()[2]) for line in lines if "over 60%" in line]
    assert f"Checkpoints with over 60% ({sum(good):,})" in PAGE.replace("\n  ", " ")


def test_the_picture_can_be_drawn(compare: ModuleType, tmp_path: Path) -> None:
    runs = [r for r in read_runs(RECORDS / "colored_mnist.records.parquet") if r.spec.test_envs == (1,)]
    compare.draw({"+80% held out": runs}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
