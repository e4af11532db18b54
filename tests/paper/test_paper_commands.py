"""`sandmask paper`, through the program."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sandmask.cli._app import app
from sandmask.paper.why import QUESTIONS, SPIRALS_QUESTIONS
from sandmask.records import read_runs, write_archive
from sandmask.records.testing import made_up_sweep


def paper(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["paper", *(str(argument) for argument in arguments)])


@pytest.fixture
def spirals(tmp_path: Path) -> Path:
    runs = made_up_sweep(["ERM", "SANDMask"], environments=17, draws=2, trials=2, dataset="Spirals", network="mlp")
    write_archive(runs, tmp_path / "spirals.records.parquet")
    return tmp_path / "spirals.records.parquet"


def test_the_help_lists_every_figure_and_table() -> None:
    shown = paper("--help").output
    for name in ("figure-1", "figure-2", "figure-3", "table-1", "table-2", "table-3", "table-pacs", "why", "compact"):
        assert name in shown


def test_the_help_of_why_lists_every_question() -> None:
    shown = paper("why", "--help").output
    assert [name for name in (*QUESTIONS, *SPIRALS_QUESTIONS) if name not in shown] == []


def test_a_figure_is_written_in_every_form(tmp_path: Path) -> None:
    result = paper("figure-3", "--quick", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "the shape of the mask" in result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"figure-3.{kind}" for kind in ("png", "pdf", "csv", "md", "tex")}
    assert (tmp_path / "out" / "figure-3.png").read_bytes().startswith(b"\x89PNG")
    first = {name: (tmp_path / "out" / name).read_bytes() for name in names}
    again = json.loads(paper("figure-3", "--quick", "--out", tmp_path / "out", "--json").output)
    assert again["tau"] == 0.9
    assert {Path(name).name for name in again["files"]} == names
    assert {name: (tmp_path / "out" / name).read_bytes() for name in names} == first  # the same figure, the same file


def test_a_table_from_records(spirals: Path, tmp_path: Path) -> None:
    result = paper("table-3", "--records", spirals, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "(4/60 runs)" in result.output
    assert (tmp_path / "out" / "table-3.tex").read_text().count(r"\begin{table}") == 3
    told = json.loads(paper("table-3", "--records", spirals, "--out", tmp_path / "out", "--json").output)
    assert told["cells"] == {"incomplete": 2 * 16 * 2}


@pytest.mark.parametrize(
    ("item", "folder"), [("table-1", "colored_mnist"), ("table-3", "spirals"), ("table-pacs", "pacs")]
)
def test_without_records_a_table_says_how_to_make_them(item: str, folder: str) -> None:
    result = paper(item)
    assert result.exit_code == 2
    assert f"sandmask sweep run runs/{folder} --config results/paper/{folder}.toml" in result.output


def test_quick_makes_a_tiny_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from sandmask.paper import _train

    tiny = replace(_train.SPIRALS, algorithms=("ERM",), steps=4, examples=40)
    monkeypatch.setitem(_train.TINY, "table-3", (tiny,))
    result = paper("table-3", "--quick", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "tiny sweep" in result.output
    assert "2/16 environments" in result.output


def test_why_and_compact(spirals: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.records.parquet"
    told = json.loads(paper("compact", spirals, "--archive", small, "--every", 200, "--json").output)
    assert (told["runs"], told["bytes"]) == (2 * 17 * 4, small.stat().st_size)
    assert len(read_runs(small)) == told["runs"]
    (tmp_path / "nothing").mkdir()
    assert paper("compact", tmp_path / "nothing", "--archive", small).exit_code == 2
    assert len(read_runs(small)) == told["runs"], "nothing does not take the place of something"
    answers = [
        paper("why", "Spirals", "--records", path, "--question", "ties", "--out", tmp_path / path.stem)
        for path in (spirals, small)
    ]
    assert answers[0].exit_code == 0, answers[0].output
    tables = [answer.output.split("Wrote")[0].split("Of all runs")[0] for answer in answers]
    assert tables[0] == tables[1]
    wrong = paper("why", "Spirals", "--records", spirals, "--question", "luck")
    assert wrong.exit_code == 2
    assert "Unknown question 'luck'" in wrong.output
    assert "--records" in paper("why", "Spirals").output


def test_claims_and_pages(tmp_path: Path) -> None:
    runs = made_up_sweep(["ERM", "SANDMask"], dataset="ColoredMNIST", network="mnist-convnet")
    write_archive(runs, tmp_path / "mnist.records.parquet")
    result = paper("claims", "--records", tmp_path, "--out", tmp_path / "results")
    assert result.exit_code == 0, result.output
    assert "Gains on ColoredMNIST" in result.output
    told = json.loads(paper("claims", "--records", tmp_path, "--out", tmp_path / "results", "--json").output)
    assert told["claims"] == ["claim-colored-mnist"]
    page = tmp_path / "docs" / "paper" / "findings.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir()
    page.write_text("<!-- table claim-colored-mnist -->\n<!-- end -->\n")
    arguments = ("pages", "--results", tmp_path / "results", "--docs", tmp_path / "docs")
    assert "findings.md" in paper(*arguments).output
    assert "SANDMask - ERM" in page.read_text()
    assert "up to date" in paper(*arguments).output
    assert "--records" in paper("claims").output


def test_figure_2_is_drawn_again_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandmask.paper import figure_2_runs

    tiny = figure_2_runs.Design(
        momenta=(0.9,),
        noises=(0.0,),
        scales=(1.0,),
        seeds=1,
        steps=11,
        draws=1,
        search_seeds=1,
        shapes=(("mlp_width", 8),),
    )
    monkeypatch.setattr(figure_2_runs, "QUICK", tiny)
    monkeypatch.setattr(figure_2_runs, "METHODS", ("ERM",))
    monkeypatch.setattr("sandmask.paper.figure_2.noise_ceiling", lambda noise: 1.0 - noise)
    made = paper("figure-2", "--quick", "--device", "cpu", "--seeds", 2, "--out", tmp_path / "a")
    assert made.exit_code == 0, made.output
    again = paper("figure-2", "--records", tmp_path / "a" / "figure-2.records.parquet", "--out", tmp_path / "b")
    assert again.exit_code == 0, again.output
    for kind in ("md", "csv", "png"):
        assert (tmp_path / "a" / f"figure-2.{kind}").read_bytes() == (tmp_path / "b" / f"figure-2.{kind}").read_bytes()
