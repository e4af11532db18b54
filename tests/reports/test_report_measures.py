"""Metrics beyond accuracy in reports, selection by them, two sets of runs compared, and commands of runs."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sandmask.cli._app import app
from sandmask.datasets import DATASETS
from sandmask.errors import SandmaskError
from sandmask.hparams import parse_overrides
from sandmask.records import RunRecord, averaged_spec, measured, read_runs, write_archive
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import build_report, grids, render, run_command
from sandmask.selection import RULES, by_metric, find_rule, select
from sandmask.training import make_spec


def with_measures(runs: list[RunRecord], seed: int = 0) -> list[RunRecord]:
    """Made-up metrics and confusion matrices of three classes."""
    rng = np.random.default_rng(seed)
    found = []
    for run in runs:
        steps, envs = len(run.steps), len(run.env_names)
        more = {
            f"{name}/{split}/{env}": rng.random(steps)
            for name in ("f1", "ece")
            for split in ("in", "out")
            for env in range(envs)
        }
        counts = rng.integers(0, 9, (steps, 2, envs, 3, 3))
        counts[..., 2, :] = 0  # a class without examples
        tables = {"confusion": counts.reshape(steps, -1)}
        found.append(replace(run, metrics={**run.metrics, **more}, classes=("x", "y", "z"), tables=tables))
    return found


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    return with_measures(made_up_sweep(["ERM", "IRM"], draws=3, trials=2, checkpoints=4))


@pytest.mark.parametrize("name", ["f1", "per-class"])
def test_a_selected_run_without_the_metric_is_missing_from_its_cells(runs: list[RunRecord], name: str) -> None:
    """A number over fewer trials than the accuracy beside it is marked as provisional."""
    cut = [
        replace(run, metrics={"loss": run.metrics["loss"]}, tables={})
        if (run.spec.algorithm, run.spec.trial_seed) == ("ERM", 0)
        else run
        for run in runs
    ]
    (rule,) = build_report(cut, ["training-domain"], metrics=[name]).rules
    (metric,) = rule.metrics
    table = metric.datasets["Toy"]
    for column in table.columns:
        cell = table.cells["ERM", column]
        if name == "f1":
            assert (cell.have, cell.expected, len(cell.values)) == (5, 6, 1)
        assert cell.mean is None or (not cell.complete and table.cells["IRM", column].complete)
    shown = render(build_report(cut, ["training-domain"], metrics=[name]))
    assert f"(without {name})" in shown
    assert "(5/6 runs)" in shown or name != "f1"


def test_a_metric_is_that_of_the_selected_checkpoints(runs: list[RunRecord]) -> None:
    (rule,) = build_report(runs, ["training-domain"]).rules
    assert [metric.metric for metric in rule.metrics] == ["f1", "ece"]
    table = rule.metrics[0].datasets["Toy"]
    for method in table.methods:
        for env, column in enumerate(table.columns):
            values = []
            for trial in (0, 1):
                own = [r for r in runs if (r.spec.algorithm, r.spec.trial_seed) == (method, trial)]
                chosen = select(RULES["training-domain"], own, env)
                assert chosen is not None
                values.append(100 * chosen.run.metrics[f"f1/in/{env}"][chosen.index])
            assert table.cells[method, column].mean == pytest.approx(np.mean(values))
            assert table.cells[method, column].error == pytest.approx(np.std(values) / np.sqrt(2))
    shown = render(build_report(runs, ["training-domain"]))
    assert "Toy, Macro-F1, model selection: training-domain" in shown
    assert "Macro-F1" not in render(build_report(runs, ["training-domain"], metrics=()))


def test_the_lowest_calibration_error_is_the_best(runs: list[RunRecord]) -> None:
    table = json.loads(render(build_report(runs), "json"))["selections"][0]["metrics"]["ece"]["datasets"]["Toy"]
    assert table["lower_is_better"]
    for column in table["columns"]:
        means = {row["method"]: row["cells"][column]["mean"] for row in table["rows"]}
        (best,) = [row["method"] for row in table["rows"] if row["cells"][column]["best"]]
        assert best == min(means, key=lambda name: means[name])


def test_classes_and_confusions(runs: list[RunRecord]) -> None:
    report = build_report(runs, metrics=["per-class", "confusion"])
    (rule,) = report.rules
    table = rule.metrics[0].datasets["Toy"]
    assert table.columns == ("x", "y", "z")
    assert table.cells["ERM", "z"].mean is None
    total = np.zeros((3, 3), dtype=np.int64)
    recalls = {0: [], 1: []}  # type: ignore[var-annotated]
    for trial in (0, 1):
        for env in range(3):
            own = [r for r in runs if (r.spec.algorithm, r.spec.trial_seed) == ("ERM", trial)]
            chosen = select(RULES["training-domain"], own, env)
            assert chosen is not None
            counts = chosen.run.tables["confusion"][chosen.index].reshape(2, 3, 3, 3)[0, env]
            total += counts
            recalls[trial].append(counts[0, 0] / counts[0].sum())
    expected = 100 * np.mean([np.mean(recalls[0]), np.mean(recalls[1])])
    assert table.cells["ERM", "x"].mean == pytest.approx(expected)
    assert rule.confusions[0].counts == tuple(map(tuple, total.tolist()))
    grid = next(grid for grid in grids(report) if "Confusion of ERM" in grid.title)
    assert grid.rows[0][1] == f"{100 * total[0, 0] / total[0].sum():.1f}"
    assert grid.rows[2] == ("z", "-", "-", "-", "0")


def test_formats_have_the_metrics(runs: list[RunRecord]) -> None:
    report = build_report(runs, metrics=["f1"])
    frame = report.frame()
    f1 = frame[(frame["metric"] == "f1") & (frame["method"] == "IRM") & (frame["environment"] == "1")]
    assert f1["mean"].tolist() == [report.rules[0].metrics[0].datasets["Toy"].cells["IRM", "1"].mean]
    assert set(frame["metric"]) == {"accuracy", "f1"}
    assert len(render(report, "csv").splitlines()) == len(frame) + 1


@pytest.mark.parametrize("metric", ["f1", "ece"])
def test_rules_can_select_by_a_metric(runs: list[RunRecord], metric: str) -> None:
    rule = by_metric(RULES["training-domain"], metric)
    assert find_rule(rule.name).description == rule.description
    for run in runs[:6]:
        values = measured(run, metric, "out")
        assert values is not None
        mean = values[:, run.train_envs].mean(1)
        choice = rule.choose(run, ())
        assert choice is not None
        assert choice.index == (mean.argmax() if metric == "f1" else mean.argmin())
    assert by_metric(RULES["oracle"], "accuracy") is RULES["oracle"]
    plain = made_up_sweep(["ERM"])
    assert rule.choose(plain[0], ()) is None
    said = f"no run recorded {metric}, which this rule needs: train with --metrics {metric}"
    assert said in " ".join(render(build_report(plain, [rule.name])).split())
    assert f"trial 0 draw 0 (without {metric});" in " ".join(
        render(build_report([*runs, *made_up_sweep(["CORAL"])], [rule.name])).split()
    )


def test_what_cannot_be_selected_by_or_shown_is_said() -> None:
    with pytest.raises(SandmaskError, match=r"No run recorded f1 and per-class\. Train with --metrics f1,per-class"):
        build_report(made_up_sweep(["ERM"]), metrics=["per-class", "f1"])
    assert build_report(made_up_sweep(["ERM"]), metrics=["all"]).rules[0].metrics == ()
    with pytest.raises(SandmaskError, match="cannot be selected by 'confusion'"):
        by_metric(RULES["oracle"], "confusion")
    with pytest.raises(SandmaskError, match="common-signal does not select by accuracy"):
        find_rule("common-signal by f1")


def test_two_sets_of_runs_are_compared(runs: list[RunRecord], tmp_path: Path) -> None:
    before = with_measures(made_up_sweep(["ERM", "VREx"], draws=3, trials=2, checkpoints=4, seed=5), seed=7)
    now, then = build_report(runs), build_report(before)
    report = build_report(runs, earlier=before)
    cell, old = (one.rules[0].datasets["Toy"].cells["ERM", "0"] for one in (report, then))
    assert cell.before is not None
    assert cell.mean is not None
    assert old.mean is not None
    assert (cell.before.mean, cell.before.error) == (old.mean, old.error)
    assert cell.values == now.rules[0].datasets["Toy"].cells["ERM", "0"].values
    assert report.rules[0].datasets["Toy"].cells["IRM", "0"].before is None
    assert report.rules[0].metrics[0].datasets["Toy"].cells["ERM", "0"].before is not None
    (change,) = report.rules[0].changes
    pairs = [
        100 * (a.selected.test_accuracy - b.selected.test_accuracy)
        for column in "012"
        for a, b in zip(*(x.rules[0].datasets["Toy"].cells["ERM", column].trials for x in (now, then)), strict=True)
        if a.selected and b.selected
    ]
    assert (change.method, change.compared.pairs) == ("ERM", 6)
    assert change.compared.difference == pytest.approx(np.mean(pairs))
    assert f"[was {old.mean:.1f}, {cell.mean - old.mean:+.1f}]" in render(report)
    write_archive(runs, tmp_path / "a.records.parquet")
    write_archive(before, tmp_path / "b.records.parquet")
    words = ["report", str(tmp_path / "a.records.parquet"), "--against", str(tmp_path / "b.records.parquet"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)["selections"][0]["datasets"]["Toy"]["rows"][0]
    assert row["cells"]["0"]["before"]["mean"] == old.mean
    with pytest.raises(SandmaskError, match="nothing to compare"):
        build_report(runs, earlier=made_up_sweep(["VREx"], dataset="Other"))


def test_averages_over_other_environments_and_other_settings_are_told_apart(runs: list[RunRecord]) -> None:
    now = [run for run in runs if run.spec.test_envs != (0,)]
    then = [replace(run, spec=replace(run.spec, steps=900)) for run in runs if run.spec.test_envs != (1,)]
    rule = build_report(now, earlier=then).rules[0]
    assert rule.averages is not None
    assert rule.datasets["Toy"].cells["ERM", "2"].before is not None
    assert rule.datasets["Toy"].averages["ERM"].before is None
    assert rule.averages.cells["ERM", "Toy"].before is None
    assert rule.averages.averages["ERM"].before is None
    assert rule.changes[0].settings == ("steps 301, before 900",)
    assert "Toy, ERM: steps 301, before 900." in render(build_report(now, earlier=then))


def test_hyperparameters_that_were_set_by_hand_are_told_apart(runs: list[RunRecord]) -> None:
    def with_tau(tau: float | None, run: RunRecord, **changes: Any) -> RunRecord:
        more = {} if tau is None else {"tau": tau}
        return replace(run, spec=replace(run.spec, hparams={**run.spec.hparams, **more}, **changes))

    def noted(now: list[RunRecord], then: list[RunRecord]) -> set[tuple[str, ...]]:
        return {change.settings for change in build_report(now, earlier=then).rules[0].changes}

    low, high = ([with_tau(tau, run) for run in runs] for tau in (0.5, 0.9))
    assert noted(low, low) == noted(low, low[::2]) == {()}
    assert noted(low, high) == {("tau 0.5, before 0.9",)}
    assert "Toy, ERM: tau 0.5, before 0.9." in render(build_report(low, earlier=high))
    assert noted([*low, *(with_tau(0.6, run, seed=1) for run in runs)], runs) == {("tau 0.5, 0.6, before none",)}
    # Draws of another space, proposals of a search and the members of soups differ in any case.
    assert noted(low, [with_tau(0.9, run, space="recipe") for run in runs]) == {("space paper, before recipe",)}
    for options in ({"search": "optuna"}, {"soup": "greedy"}):
        assert noted(*([with_tau(tau, run, options=options) for run in runs] for tau in (0.5, 0.9))) == {()}


@pytest.mark.parametrize("is_earlier", [True, False])
def test_accuracies_that_are_nan_are_not_compared(is_earlier: bool) -> None:
    runs = made_up_sweep(["ERM", "IRM"], trials=3)
    broken = [
        replace(run, accuracy_in=run.accuracy_in * np.nan)
        if (run.spec.algorithm, run.spec.test_envs) == ("IRM", (0,))
        else run
        for run in runs
    ]
    report = build_report(runs, earlier=broken) if is_earlier else build_report(broken, earlier=runs)
    assert "nan" not in render(report)
    assert "nan" not in render(report, "csv")
    cells = report.rules[0].datasets["Toy"].cells
    assert cells["IRM", "0"].change is None
    assert (cells["IRM", "0"].before is None) == is_earlier
    found = {change.method: change.compared for change in report.rules[0].changes}
    assert (found["ERM"].pairs, found["IRM"].pairs) == (9, 6)
    assert (found["IRM"].difference, found["IRM"].p_value) == (0, 1)


@pytest.mark.parametrize(
    "more", [{}, {"averages": ["sma", "ema"]}, {"shared_init": True, "precision": "bf16"}, {"hparams": {"lr": 1e-5}}]
)
def test_the_command_of_a_run_trains_the_same_run(more: dict[str, object]) -> None:
    spec = make_spec(DATASETS["Spirals"], "SANDMask", [2], hparams_seed=3, trial_seed=1, seed=5, **more)  # type: ignore[arg-type]
    words = shlex.split(run_command(spec))
    assert words[:4] == ["sandmask", "train", "Spirals", "SANDMask"]
    options: dict[str, list[str]] = {}
    flags = [word for word in words[4:] if word == "--shared-init"]
    rest = [word for word in words[4:] if word != "--shared-init"]
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        options.setdefault(name.removeprefix("--").replace("-", "_"), []).append(value)
    # A browser writes numbers without ".0".
    for write in (str, lambda text: text.removesuffix(".0")):
        again = make_spec(
            DATASETS["Spirals"],
            "SANDMask",
            [int(env) for env in options["test_env"]],
            steps=int(options["steps"][0]),
            checkpoint_every=int(options["checkpoint_every"][0]),
            hparams=parse_overrides([write(text) for text in options["hparam"]]),
            hparams_seed=3,
            trial_seed=1,
            seed=5,
            space=options["space"][0],
            network=options["network"][0],
            precision=options["precision"][0],
            averages=options.get("average", [""])[0].split(",") if "average" in options else (),
            shared_init=bool(flags),
        )
        assert again.id == spec.id


def test_the_command_of_any_run_is_printed(runs: list[RunRecord], tmp_path: Path) -> None:
    write_archive(runs, tmp_path / "a.records.parquet")
    run = read_runs(tmp_path)[3]
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--command", run.spec.id[:10]])
    assert done.stdout.strip() == run_command(run)
    assert "--test-env" in done.stdout
    assert done.stderr == ""
    own = made_up_sweep(["ERM"], dataset="photos-3f2a9c51", draws=1, trials=1)[1]
    assert "--test-env b " in run_command(own.spec, ("1", "b", "0"))
    write_archive([own], tmp_path / "own.records.parquet")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--command", own.spec.id])
    assert "photos-3f2a9c51 is a dataset of your own. Write its path" in done.stderr
    imported = replace(own, spec=replace(own.spec, options={"source": "domainbed"}))
    assert run_command(imported) == ""
    write_archive([imported], tmp_path / "imported.records.parquet")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--command", imported.spec.id])
    assert "was imported from domainbed. It can only be trained again there." in " ".join(done.stderr.split())
    assert done.exit_code == 2
    adapted = replace(own, spec=replace(own.spec, options={"average": "sma", "soup": "t3a"}))
    write_archive([adapted], tmp_path / "adapted.records.parquet")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--command", adapted.spec.id])
    assert (done.stdout, done.stderr) == (f"sandmask soup {tmp_path} --kind t3a --of sma\n", "")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--command", "nothing"])
    assert "holds no runs whose id begins with 'nothing'. The page of --html lists" in done.stderr


def test_the_command_of_a_run_with_averages_is_found_by_its_own_id_and_by_that_in_a_report(tmp_path: Path) -> None:
    run = made_up_run([[0.5, 0.5]], options={"averages": "sma"})
    write_archive([run], tmp_path / "a.records.parquet")
    for spec in (run.spec, averaged_spec(run.spec), averaged_spec(run.spec, "sma")):
        done = CliRunner().invoke(app, ["report", str(tmp_path), "--command", spec.id])
        assert done.stdout.strip() == run_command(spec, run.env_names), done.stderr
