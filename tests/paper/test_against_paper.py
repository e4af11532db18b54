"""`--against-paper`: the printed numbers beside ours, in tables and in every format."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.paper import environments, printed
from sandmask.paper._compare import printed_row
from sandmask.records import RunRecord, write_archive
from sandmask.records.testing import made_up_sweep
from sandmask.reports import RuleReport, Table, build_report, render


def report(runs: list[RunRecord], rule: str = "training-domain") -> RuleReport:
    return build_report(runs, [rule], against_paper=True).rules[0]


def table(runs: list[RunRecord]) -> Table:
    (found,) = report(runs).datasets.values()
    return found


def swept(algorithms: list[str], dataset: str = "PACS") -> list[RunRecord]:
    names = environments(dataset)
    runs = made_up_sweep(algorithms, environments=len(names), draws=2, dataset=dataset)
    return [replace(run, env_names=names) for run in runs]


def test_the_papers_numbers_stand_beside_ours() -> None:
    found = report(swept(["SANDMask", "Mine"]), "oracle")
    pacs = found.datasets["PACS"]
    cell = pacs.cells["SANDMask", "A"]
    assert cell.paper is not None
    assert cell.mean is not None
    assert cell.difference == pytest.approx(cell.mean - cell.paper.mean)
    assert (cell.paper.table, cell.paper.mean, cell.paper.error) == ("appendix", 86.1, 0.6)
    average = pacs.averages["SANDMask"].paper
    assert average is not None
    assert (average.table, average.mean) == ("appendix", 85.9)
    assert found.averages is not None
    overall = found.averages.cells["SANDMask", "PACS"].paper
    assert overall is not None
    assert (overall.table, overall.error) == ("2", 0.4)
    assert found.averages.averages["SANDMask"].paper is None  # the paper's is over seven datasets
    assert pacs.cells["Mine", "A"].paper is None
    some = report([run for run in swept(["SANDMask"]) if run.spec.test_envs[0] < 2])
    assert some.averages is not None
    assert some.averages.cells["SANDMask", "PACS"].paper is None  # over two of four environments
    plain = build_report(swept(["SANDMask"]), ["oracle"]).rules[0].datasets["PACS"]
    assert plain.cells["SANDMask", "A"].paper is None


def test_the_average_over_the_papers_datasets_compares_with_its() -> None:
    names = ("ColoredMNIST", "RotatedMNIST", "VLCS", "PACS", "OfficeHome", "TerraIncognita", "DomainNet")
    runs = [run for name in names for run in swept(["ERM"], name)]
    averages = report(runs).averages
    assert averages is not None
    assert averages.columns == names
    assert averages.averages["ERM"].paper == printed("training-domain", "Avg", "ERM")
    more = report([*runs, *made_up_sweep(["ERM"])]).averages
    assert more is not None
    assert more.averages["ERM"].paper is None


def test_an_average_compares_only_over_the_papers_environments() -> None:
    runs = made_up_sweep(["ERM"], environments=17, draws=1, trials=1, dataset="Spirals")
    assert table(runs).averages["ERM"].paper is None  # the paper's is over sixteen
    assert table([run for run in runs if run.spec.test_envs != (16,)]).averages["ERM"].paper is not None


def test_the_paper_has_no_numbers_of_averaged_weights() -> None:
    runs = swept(["ERM"])
    averaged = [replace(run, spec=replace(run.spec, options={"average": "sma"})) for run in runs]
    pacs = table([*runs, *averaged])
    assert pacs.cells["ERM", "A"].paper is not None
    assert pacs.cells["ERM + SMA", "A"].paper is None
    assert pacs.averages["ERM + SMA"].paper is None


def test_formats_show_and_explain_them(tmp_path: Path) -> None:
    runs = swept(["ERM", "SANDMask"])
    built = build_report(runs, ["training-domain"], against_paper=True)
    cell = json.loads(render(built, "json"))["selections"][0]["datasets"]["PACS"]["rows"][0]["cells"]["A"]
    assert cell["paper"] == {"mean": 84.7, "error": 0.4, "table": "appendix"}
    assert cell["difference"] == built.rules[0].datasets["PACS"].cells["ERM", "A"].difference
    assert "[the paper's number, ours minus the paper's before rounding]" in render(built)
    assert "before rounding]" not in render(build_report(made_up_sweep(["ERM"]), against_paper=True))
    write_archive(runs, tmp_path / "some.records.parquet")
    options = ["--selection", "training-domain", "--against-paper"]
    assert CliRunner().invoke(app, ["report", str(tmp_path), *options]).output == render(built)


@pytest.mark.parametrize(("method", "row"), [("ERM", "ERM"), ("ERM (precision=bf16)", "ERM"), ("ERM + SMA", None)])
def test_only_the_method_itself_is_compared_with_its_printed_row(method: str, row: str | None) -> None:
    found = printed("training-domain", "PACS", printed_row(method))
    assert (found and found.algorithm) == row
