"""Pages with generated parts: these are the results' own."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sandmask.errors import SandmaskError
from sandmask.paper.claims import FIGURE_2_CLAIMS, TABLE_CLAIMS, claims
from sandmask.paper.pages import MISSING, fill_page, fill_pages, look_up
from sandmask.paper.tables import read_all, table_3
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.sweeps import SweepSpec, expand, read_sweep

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "results" / "paper", ROOT / "docs"
PAGES = [
    page
    for page in [*sorted(DOCS.rglob("*.md")), *sorted(RESULTS.glob("*.md"))]
    if "<!-- " in page.read_text(encoding="utf-8")
]


def test_blocks_are_filled_and_filled_again(tmp_path: Path) -> None:
    (tmp_path / "docs" / "paper").mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir()
    page = tmp_path / "docs" / "paper" / "x.md"
    page.write_text("a\n<!-- table t -->\nold\n<!-- end -->\nb\n<!-- picture p: words -->\n<!-- end -->\n")
    assert fill_pages(tmp_path, tmp_path / "docs") == [page]
    assert page.read_text().count(MISSING) == 2
    (tmp_path / "t.md").write_text("| x |\n")
    (tmp_path / "p.png").write_bytes(b"picture")
    fill_pages(tmp_path, tmp_path / "docs")
    picture = "<!-- picture p: words -->\n![words](../images/paper-p.png)\n<!-- end -->"
    assert page.read_text() == f"a\n<!-- table t -->\n| x |\n<!-- end -->\nb\n{picture}\n"
    assert (tmp_path / "docs" / "images" / "paper-p.png").read_bytes() == b"picture"
    assert fill_pages(tmp_path, tmp_path / "docs") == []
    with pytest.raises(SandmaskError, match="has no pages"):
        fill_pages(tmp_path, tmp_path / "elsewhere")


def test_sections_and_cells_are_taken_from_results(tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    (tmp_path / "h200").mkdir()
    two = "| what | value |\n| --- | ---: |\n| τ < 1 | 7 |\n| -90% | 8 |"
    (tmp_path / "h200" / "speed.md").write_text(
        "# All\n\n## One: more words\n\n| a | b, c |\n|---|---|\n| x | 1.0 ± 0.1 (2 runs) [3.0 ± 0.3] |\n\n"
        f"## Two\n\n{two}\n",
        encoding="utf-8",
    )

    def filled(page: str) -> str:
        return fill_page(page, tmp_path / "paper", tmp_path)

    opening = "<!-- table h200/speed: Two -->\n"
    assert filled(f"{opening}<!-- end -->\n") == f"{opening}{two}\n<!-- end -->\n"
    cell = '<data value="h200/speed / One /\n x / b, c">?</data>'
    assert filled(cell) == cell.replace("?", "1.0 ± 0.1")
    assert filled('<data value="h200/speed / τ &lt; 1">?</data>') == '<data value="h200/speed / τ &lt; 1">7</data>'
    assert look_up(tmp_path, "h200/speed / One / x / b, c, paper") == "3.0 ± 0.3"
    assert look_up(tmp_path, "h200/speed / Two / -90%; 8 / value") == "8"


@pytest.mark.parametrize(
    "reference", ["h200/no / x", "h200/speed", "h200/speed / y", "h200/speed / One / x / d", "h200/speed / T / x / b"]
)
def test_a_reference_to_nothing_is_an_error(tmp_path: Path, reference: str) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "speed.md").write_text("## One\n\n| a | b |\n|---|---|\n| x | 1 |\n")
    with pytest.raises(SandmaskError, match=r"does not name a cell|exactly one"):
        look_up(tmp_path, reference)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_what_the_results_have(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_page(text, RESULTS, DOCS / "images") == text, "run: sandmask paper pages"


@pytest.mark.parametrize("config", sorted(RESULTS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_sweeps_can_be_planned(config: Path) -> None:
    sweep = SweepSpec(**read_sweep(config))
    text = config.read_text(encoding="utf-8")
    assert f"sandmask sweep run runs/{config.stem} --config results/paper/{config.name}" in text
    stated = re.search(r"= ([\d,]+) runs", text)
    if stated:
        assert len(expand(sweep).runs) == int(stated[1].replace(",", ""))


def test_claims_come_from_whatever_records_there_are() -> None:
    colored = made_up_sweep(["ERM", "SANDMask"], dataset="ColoredMNIST", network="mnist-convnet")
    (product,) = claims(colored)
    assert product.name == "claim-colored-mnist"
    assert "| SANDMask - ERM | oracle |" in product.words()
    assert "+4.5" in product.words()  # the paper's 62.3 - 57.8
    extra = [
        replace(run, spec=replace(run.spec, hparams_seed=100), accuracy_in=1 - run.accuracy_in)
        for run in colored
        if run.spec.algorithm == "SANDMask" and run.spec.hparams_seed == 0
    ]
    (again,) = claims([*colored, *extra])
    assert again.words() == product.words()  # draws that only one of the two has are no part of the difference
    default = [
        replace(run, spec=replace(run.spec, hparams={"tau": 1.0 if run.spec.hparams_seed == 0 else 0.5}))
        for run in colored
    ]
    assert "| SANDMask, τ < 1 - ERM | oracle |" in claims(default)[0].words()
    failures = [
        made_up_run(
            [[0.5 + 0.1 * (beta > 0) + seed / 100, *[0.5] * 16]],
            algorithm="ANDMask",
            seed=seed,
            hparams={"adam_beta1": beta},
            options={"noise": 0.0, "init_scale": 1.0},
            dataset="Spirals",
            network="mlp",
        )
        for seed in range(6)
        for beta in (0.0, 0.9)
    ]
    made = {product.name: product.words() for product in claims(failures)}
    assert set(made) == {"claim-momentum", "claim-noise", "claim-initialization"}
    assert "| AND-mask | 52.5 | 62.5 | +10.0 | +10.0 to +10.0 |" in made["claim-momentum"]
    assert "| AND-mask | 62.5 (25%) |" in made["claim-noise"]
    with pytest.raises(SandmaskError, match="cannot test the claims"):
        claims([made_up_run([[0.5, 0.5]])])
    with pytest.raises(SandmaskError, match="no runs on Spirals"):
        table_3(failures)  # runs of Figure 2 are on Spirals, and not of its table
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "paper" / "findings.md", RESULTS / "notes.md")]
    assert {name for page in pages for name in re.findall(r"<!-- table (claim-[\w-]+)[: ]", page)} == {
        *FIGURE_2_CLAIMS,
        *TABLE_CLAIMS,
    }


def test_archives_are_small_and_readable() -> None:
    for archive in sorted(RESULTS.glob("*.records.parquet")):
        assert archive.stat().st_size < 8 * 2**20, archive
        assert read_all([archive]), archive
