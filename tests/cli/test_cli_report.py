"""`sandmask report` and `sandmask import-domainbed`, through the installed command."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from sandmask.cli.import_domainbed import import_domainbed
from sandmask.cli.report import report
from sandmask.errors import SandmaskError
from sandmask.records import read_runs, write_archive
from sandmask.records.testing import made_up_sweep
from sandmask.reports import build_report, render
from sandmask.selection import RULES


def run(function: object, *arguments: object) -> Result:
    app = typer.Typer()
    app.command()(function)  # type: ignore[type-var]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_archive(made_up_sweep(["ERM", "SANDMask"], pairs=True), tmp_path / "x.records.parquet")
    return tmp_path


def test_the_default_is_the_papers_two_rules_as_text(store: Path) -> None:
    result = run(report, store)
    assert result.exit_code == 0
    assert result.output == render(build_report(read_runs(store), ["training-domain", "oracle"]))


def test_rules_can_be_named_or_all_taken(store: Path) -> None:
    result = run(report, store, "--selection", "oracle", "--selection", "Worst_Training_Domain")
    assert result.output == render(build_report(read_runs(store), ["oracle", "worst-training-domain"]))
    everything = run(report, store, "--selection", "all")
    assert everything.output == render(build_report(read_runs(store), list(RULES)))


@pytest.mark.parametrize("name", ["text", "markdown", "latex", "csv", "json"])
def test_formats_and_options_reach_the_report(store: Path, name: str) -> None:
    options = ["--draws", "5", "--trials", "3", "--baseline", "SANDMask", "--no-statistics"]
    result = run(report, store, "--format", name, *options)
    built = build_report(read_runs(store), ["training-domain", "oracle"], baseline="SANDMask", draws=5, trials=3)
    assert result.output == render(built, name, statistics=False)


def test_json_has_its_usual_switch(store: Path) -> None:
    assert run(report, store, "--json").output == run(report, store, "--format", "json").output


def test_a_report_can_go_to_a_file(store: Path) -> None:
    target = store / "tables" / "report.json"
    result = run(report, store, "--format", "json", "--output", target)
    assert result.exit_code == 0
    assert json.loads(target.read_text())["runs"] == 2 * 6 * 2 * 4
    assert [path.name for path in target.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--selection", "orakel"], "Did you mean 'oracle'"),
        (["--format", "html5"], "Unknown report format 'html5'"),
        (["--format", "latex", "--json"], "Use --json or --format latex, not both."),
    ],
)
def test_mistakes_are_told(store: Path, arguments: list[str], message: str) -> None:
    result = run(report, store, *arguments)
    assert isinstance(result.exception, SandmaskError)
    assert message in str(result.exception)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    result = run(report, tmp_path)
    assert isinstance(result.exception, SandmaskError)
    assert "no runs to report" in str(result.exception)


def domainbed_run(folder: Path, algorithm: str, env: int, *, done: bool = True) -> None:
    folder.mkdir(parents=True)
    args = {
        "algorithm": algorithm,
        "dataset": "ColoredMNIST",
        "test_envs": [env],
        "trial_seed": 0,
        "hparams_seed": 0,
        "seed": env,
    }
    record = {"args": args, "hparams": {"lr": 0.001}, "step": 0, "loss": 0.5}
    record |= {f"env{number}_{split}_acc": 0.25 + number / 4 for number in range(3) for split in ("in", "out")}
    (folder / "results.jsonl").write_text(json.dumps(record) + "\n")
    if done:
        (folder / "done").write_text("done")


def test_a_domainbed_sweep_is_imported_and_reported(tmp_path: Path) -> None:
    for env in range(3):
        domainbed_run(tmp_path / "sweep" / f"e{env}", "ERM", env)
        domainbed_run(tmp_path / "sweep" / f"i{env}", "IRM", env, done=env < 2)
    first = run(import_domainbed, tmp_path / "sweep", "--out", tmp_path / "store")
    assert first.exit_code == 0
    assert "Imported 5 runs (1 skipped)" in first.output
    assert "i2: not finished (no file `done`)." in first.output
    second = run(import_domainbed, tmp_path / "sweep", "--out", tmp_path / "store", "--include-incomplete")
    assert "Imported 6 runs (0 skipped)" in second.output
    assert len(read_runs(tmp_path / "store")) == 6
    lines = run(report, tmp_path / "store").output.splitlines()
    assert lines[1].split() == ["Algorithm", "+90%", "+80%", "-90%", "Avg"]
    assert lines[3].split() == ["ERM", "25.0", "50.0", "75.0", "50.0"]  # one trial: no error
    assert "0/1 runs" in lines[4]


def test_an_unfinished_domainbed_sweep_says_how_to_take_it(tmp_path: Path) -> None:
    domainbed_run(tmp_path / "sweep" / "a", "ERM", 0, done=False)
    result = run(import_domainbed, tmp_path / "sweep", "--out", tmp_path / "store")
    assert isinstance(result.exception, SandmaskError)
    assert "--include-incomplete" in str(result.exception)
    assert not (tmp_path / "store").exists()
    (tmp_path / "sweep" / "a" / "results.jsonl").write_text("")
    result = run(import_domainbed, tmp_path / "sweep", "--out", tmp_path / "store", "--include-incomplete")
    assert str(result.exception) == f"No run in {tmp_path / 'sweep'} has results yet (1 found)."


def test_importing_another_sweep_of_the_same_name_loses_nothing(tmp_path: Path) -> None:
    domainbed_run(tmp_path / "first" / "sweep" / "a", "ERM", 0)
    domainbed_run(tmp_path / "second" / "sweep" / "a", "IRM", 0)
    assert run(import_domainbed, tmp_path / "first" / "sweep", "--out", tmp_path / "store").exit_code == 0
    result = run(import_domainbed, tmp_path / "second" / "sweep", "--out", tmp_path / "store")
    assert isinstance(result.exception, SandmaskError)
    assert "would lose 1 run that the 1 imported runs do not include" in str(result.exception)
    assert [record.spec.algorithm for record in read_runs(tmp_path / "store")] == ["ERM"]


def test_page_and_tables_do_not_share_a_file(store: Path) -> None:
    result = run(report, store, "--html", store / "x.html", "--output", store / "." / "x.html")
    assert isinstance(result.exception, SandmaskError)
    assert "Name two different files" in str(result.exception)
    assert not (store / "x.html").exists()


def test_a_dash_is_standard_output(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store)
    before = sorted(store.iterdir())
    assert run(report, store, "--output", "-").stdout == run(report, store).stdout
    page = run(report, store, "--html", "-")
    assert page.stdout.startswith("<!doctype html>")
    assert page.stdout.rstrip().endswith("</html>")
    for arguments in (["--open"], ["--format", "text"], ["--output", "-"]):
        assert isinstance(run(report, store, "--html", "-", *arguments).exception, SandmaskError)
    assert sorted(store.iterdir()) == before


def test_both_are_commands_of_the_program(store: Path) -> None:
    from sandmask.cli._app import app

    runner = CliRunner()
    assert "ERM" in runner.invoke(app, ["report", str(store)]).output
    wrong = runner.invoke(app, ["report", str(store / "nowhere")])
    assert wrong.exit_code == 2
    assert "does not exist" in wrong.output
    assert runner.invoke(app, ["import-domainbed", str(store), "--out", str(store)]).exit_code == 2


def test_the_format_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    result = run(report, tmp_path / "nowhere", "--format", "html")
    assert isinstance(result.exception, SandmaskError)
    assert "--html FILE, such as --html report.html" in str(result.exception)
    result = run(report, tmp_path / "nowhere", "--format", "markdwon")
    assert "Did you mean 'markdown'" in str(result.exception)


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_records_are_not_overwritten_by_their_tables(store: Path, option: str) -> None:
    (archive,) = store.glob("*.parquet")
    before = archive.read_bytes()
    result = run(report, store, option, archive)
    assert isinstance(result.exception, SandmaskError)
    assert "named like a file of records" in str(result.exception)
    assert archive.read_bytes() == before


def test_absurd_numbers_of_draws_are_refused(store: Path) -> None:
    assert run(report, store, "--draws", 10**9).exit_code == 2


OWN_RULE = """
from sandmask.selection import Choice, selection_rule

@selection_rule("low-loss", "lowest training loss", needs_metrics=("loss",))
def low_loss(run):
    return Choice(int(run.metrics["loss"].argmin()), (-float(run.metrics["loss"].min()),))
"""


@pytest.mark.parametrize("named_by", ["variable", "option"])
def test_a_rule_of_a_plugin_file_is_used(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    plugin = tmp_path / "rules.py"
    plugin.write_text(OWN_RULE)
    option = ["--plugin", plugin] if named_by == "option" else []
    if named_by == "variable":
        monkeypatch.setenv("SANDMASK_PLUGINS", str(plugin))
    result = run(report, store, "--selection", "low-loss", *option)
    assert result.exit_code == 0
    assert "model selection: low-loss" in result.output
