"""The formats: the same words in each, and each one well formed."""

import json
import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import FORMATS, Cell, Report, build_report, cell_text, grids, render
from sandmask.reports._formats import latex
from sandmask.reports._grids import Grid


class Published(NamedTuple):
    """A number that others have printed."""

    mean_digits: str
    table: str = "2"
    error: float | None = 0.3

    @property
    def mean(self) -> float:
        return float(self.mean_digits)


@pytest.fixture(scope="module")
def full() -> Report:
    names = ("A", "C", "P", "S")
    runs = made_up_sweep(["ERM", "SANDMask"], environments=4, draws=3, trials=2, dataset="PACS")
    runs = [replace(run, env_names=names) for run in runs]
    runs[0] = replace(runs[0], status="diverged", diverged_at=250)
    runs[1] = replace(runs[1], status="running")
    runs += made_up_sweep(["ERM"], dataset="50%_set & more")
    return build_report(runs, ["training-domain", "oracle", "leave-one-domain-out"])


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Cell(mean=81.25, error=0.44, have=60, expected=60), "81.2 ± 0.4"),
        (Cell(mean=81.35, have=60, expected=60), "81.3"),
        (Cell(mean=100.0, error=0.0, have=6, expected=6, diverged=1), "100.0 ± 0.0†"),
        (Cell(mean=81.2, error=0.4, have=57, expected=60), "81.2 ± 0.4 (57/60 runs)"),
        (Cell(mean=None, have=0, expected=60), "0/60 runs"),
        (Cell(mean=None, have=60, expected=60, diverged=60), "60/60 runs†"),
        (Cell(mean=None), "-"),
    ],
)
def test_cells_in_words(cell: Cell, words: str) -> None:
    assert cell_text(cell) == words


def test_a_published_number_follows_ours() -> None:
    paper = Published("97.25")
    assert cell_text(Cell(96.0, 0.5, have=1, expected=1, paper=paper)) == "96.0 ± 0.5 [97.25, -1.2]"
    assert cell_text(Cell(None, have=0, expected=1, paper=paper)) == "0/1 runs [97.25]"


def test_one_decimal_is_rounded_as_pythons_format_does() -> None:
    run = made_up_run([[0.8125, 0.5]])  # 81.25 lies exactly between
    grid = grids(build_report([run], ["training-domain"]))[0]
    assert grid.rows[0][1] == f"{81.25:.1f}"  # one trial: no error


def test_every_format_shows_every_cell(full: Report) -> None:
    for name in ("text", "markdown", "latex"):
        words = render(full, name)
        plain = words.replace(r"$\pm$", "±").replace(r"$^\dagger$", "†").replace("$-$", "-").replace("\\", "")
        for grid in grids(full):
            assert grid.title in plain
            for row in grid.rows:
                for word in row:
                    assert word.replace("<", "$<$") in plain or word in plain


def test_notes_say_what_diverged_and_what_is_missing(full: Report) -> None:
    text = render(full)
    assert "† ERM, A: diverged: trial 0 draw 0 at step 250." in text
    assert "ERM, A: missing: trial 0 draw 1 (at step 400 of 401)." in text
    assert "PACS: no run holds out two environments, which this rule needs." in text
    assert "Compared with ERM" in text
    assert "Compared with ERM" not in render(full, statistics=False)


def test_long_lists_of_missing_runs_are_cut() -> None:
    report = build_report(made_up_sweep(["ERM"], draws=1, trials=1), ["oracle"], draws=20)
    text = " ".join(render(report).split())  # long notes are wrapped
    assert "trial 0 draw 6; and 13 more." in text


def test_text_columns_line_up(full: Report) -> None:
    block = render(full).split("\n\n")[0].splitlines()
    rule = block[2]
    ends = [match.end() for match in re.finditer("-+", rule)]
    for line in block[3:5]:
        for end in ends:
            assert line[end : end + 2].strip() == ""
            assert line[end - 1] != " " or end == ends[0]


def wide() -> list[RunRecord]:
    return made_up_sweep(["ERM", "IRM"], environments=17, draws=1, trials=2, dataset="Spirals")


def test_a_wide_table_is_turned_on_its_side_in_text_only() -> None:
    report = build_report(wide(), ["training-domain"])
    lines = render(report).splitlines()
    assert lines[1].split() == ["ERM", "IRM"]
    assert lines[3].startswith("0 ")
    assert lines[20].startswith("Avg")
    assert "| Algorithm | 0 | 1 |" in render(report, "markdown")


def test_markdown_rows_have_as_many_columns_as_their_header(full: Report) -> None:
    for block in render(full, "markdown").split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) <= 1


def test_names_in_brackets_are_not_arguments_in_latex() -> None:
    r"""After `\\` and `\midrule`, LaTeX takes [cat] for a length."""
    words = latex([Grid("Confusion", ("Class", "[cat]"), (("[cat]", "1"), ("*dog", "2")))])
    assert "\n{}[cat] & 1" in words
    assert "\n{}*dog & 2" in words


def test_latex_is_balanced_and_escaped(full: Report) -> None:
    words = render(full, "latex")
    assert words.count(r"\begin{table}") == words.count(r"\end{table}") == len(grids(full)) - 1
    assert words.count(r"\toprule") == words.count(r"\bottomrule") == words.count(r"\midrule")
    assert r"50\%\_set \& more" in words
    assert "±" not in words
    assert "†" not in words
    body = "\n".join(line for line in words.splitlines() if not line.startswith("%"))
    depth = 0
    for letter in re.sub(r"\\[{}]", "", body):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    for block in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", body, re.DOTALL):
        for line in block[1].splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(block[0]) - 1


def test_json_has_everything_unrounded(full: Report) -> None:
    content = json.loads(render(full, "json"))
    assert content["schema"] == 1
    assert [item["selection"] for item in content["selections"]] == [
        "training-domain",
        "oracle",
        "leave-one-domain-out",
    ]
    first = content["selections"][0]
    row = first["datasets"]["PACS"]["rows"][0]
    cell, data = row["cells"]["A"], full.rules[0].datasets["PACS"].cells["ERM", "A"]
    assert row["method"] == "ERM"
    assert (cell["mean"], cell["error"], cell["interval"]) == (data.mean, data.error, data.interval)
    assert (cell["runs"], cell["expected_runs"], cell["diverged_runs"], cell["complete"]) == (5, 6, 1, False)
    assert cell["trials"][0]["missing"] == [{"trial_seed": 0, "hparams_seed": 1, "why": "at step 400 of 401"}]
    selected = data.trials[0].selected
    assert selected is not None
    assert cell["trials"][0]["run"] == selected.run.spec.id
    assert cell["trials"][0]["step"] == selected.step
    assert "paper" not in cell
    assert first["statistics"]["baseline"] == "ERM"
    assert content["selections"][2]["averages"] is None


def test_unknown_formats_are_refused(full: Report) -> None:
    assert list(FORMATS) == ["text", "markdown", "latex", "csv", "json"]
    with pytest.raises(SandmaskError, match="Did you mean 'markdown'"):
        render(full, "markdwon")


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    cell = Cell(mean=84.68, expected=1, have=1, paper=Published("84.7"))
    assert cell_text(cell).endswith(", +0.0]")
