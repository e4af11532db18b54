"""What other ties, other intervals and other ranges of tau would have given; and that compact records agree."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.paper._select import averages, by_rule, compact, every, tied, trial_choices, validation
from sandmask.paper.why import (
    QUESTIONS,
    evaluation_frequency,
    other_rules,
    pick_tied,
    tau_range,
    tie_breaking,
    why,
)
from sandmask.records import RunRecord, average_metrics, read_runs, write_archive
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import build_report, render
from sandmask.reports._report import rule_names
from sandmask.selection import RULES, select


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    """Many ties: accuracies are fractions of 4. Every method has a tau."""
    sweep = made_up_sweep(["ANDMask", "SANDMask"], checkpoints=41, size=4, pairs=True, draws=3, trials=2)
    spread = [replace(run, steps=run.steps // 10) for run in sweep]  # every 10 steps, 0 to 400
    return [
        replace(run, spec=replace(run.spec, hparams={**run.spec.hparams, "tau": run.spec.hparams_seed / 2}))
        for run in spread
    ]


def test_ours_is_the_registered_rule(runs: list[RunRecord]) -> None:
    rule = RULES["training-domain"]
    ours = trial_choices(runs, pick_tied("first", "last"))
    registered = trial_choices(runs, lambda group, env: select(rule, group, env))
    assert ours.keys() == registered.keys()
    for key, chosen in ours.items():
        assert (chosen.run.spec.id, chosen.step) == (registered[key].run.spec.id, registered[key].step)


def test_ties_are_broken_as_asked() -> None:
    # held out 0; validation on 1 and 2: checkpoints 1, 2 and 3 tie
    accuracy = [[0.1, 0.5, 0.5], [0.2, 1.0, 1.0], [0.9, 1.0, 1.0], [0.4, 1.0, 1.0]]
    draws = [made_up_run(accuracy, hparams_seed=draw, seed=draw) for draw in (0, 1)]
    draws[1] = replace(draws[1], accuracy_in=draws[1].accuracy_in / 2)
    assert tied(draws[0]).tolist() == [1, 2, 3]
    assert validation(draws[0]).tolist() == [0.5, 1.0, 1.0, 1.0]
    expected = {
        ("first", "last"): (1, 1),
        ("first", "first"): (0, 1),
        ("last", "last"): (1, 3),
        ("worst", "worst"): (1, 1),
        ("best", "best"): (0, 2),
    }
    for way, (draw, index) in expected.items():
        chosen = pick_tied(*way)(draws, 0)
        assert chosen is not None
        assert (chosen.run.spec.hparams_seed, chosen.index) == (draw, index), way
    assert pick_tied("first", "last")(draws, 1) is None


def test_averages_are_those_of_the_report(runs: list[RunRecord]) -> None:
    rule = RULES["training-domain"]
    found = averages(trial_choices(runs, lambda group, env: select(rule, group, env)), 3)
    report = build_report(runs, ["training-domain"]).rules[0].averages
    assert report is not None
    for method in ("ANDMask", "SANDMask"):
        cell = report.cells[method, "Toy"]
        value = found[method]
        assert value is not None
        assert value == pytest.approx((cell.mean, cell.error))
    fewer = [run for run in runs if run.spec.test_envs != (2,)]
    assert averages(trial_choices(fewer, lambda group, env: select(rule, group, env)), 3)["ANDMask"] is None


def test_thinning_keeps_multiples_and_the_last() -> None:
    run = replace(made_up_run([[0.1 * k, 0.0] for k in range(8)]), steps=np.arange(8) * 10)
    assert run.steps[every(run, 30)].tolist() == [0, 30, 60, 70]
    run.tables["confusion"] = np.arange(8)[:, None]
    fewer = run.at(every(run, 30))
    assert fewer.accuracy_in[:, 0].tolist() == pytest.approx([0.0, 0.3, 0.6, 0.7])
    assert fewer.metrics["loss"].tolist() == run.metrics["loss"][[0, 3, 6, 7]].tolist()
    assert fewer.tables["confusion"][:, 0].tolist() == [0, 3, 6, 7]
    assert fewer.spec == run.spec


def test_the_range_of_tau_restricts_who_competes(runs: list[RunRecord]) -> None:
    grid = tau_range(runs, "Toy")
    within = [run for run in runs if run.spec.hparams["tau"] >= 0.5]
    rule = RULES["training-domain"]
    expected = averages(trial_choices(within, lambda group, env: select(rule, group, env)), 3)["SANDMask"]
    assert expected is not None
    row = dict(zip(grid.header, next(row for row in grid.rows if row[0] == "SANDMask"), strict=True))
    assert row["τ in [0.5, 1]"] == f"{expected[0]:.1f} ± {expected[1]:.1f}"
    with pytest.raises(SandmaskError, match="No run on Toy"):
        tau_range([made_up_run([[0.5, 0.5]])], "Toy")


def test_other_rules_are_those_of_the_report(runs: list[RunRecord]) -> None:
    grid = other_rules(runs, "Toy")
    assert grid.header[1:4] == ("training-domain", "worst-training-domain", "oracle")
    for name, cell in zip(grid.header[1:4], next(row[1:4] for row in grid.rows if row[0] == "SANDMask"), strict=True):
        expected = averages(trial_choices(runs, by_rule(name)), 3)["SANDMask"]
        assert expected is not None
        assert cell == f"{expected[0]:.1f} ± {expected[1]:.1f}"


def test_every_question_is_answered(runs: list[RunRecord]) -> None:
    product = why(runs, "Toy")
    assert len(product.grids) == len(QUESTIONS)
    assert "every 10" in evaluation_frequency(runs, "Toy").header
    with pytest.raises(SandmaskError, match="Unknown question 'luck'"):
        why(runs, "Toy", ["luck"])
    with pytest.raises(SandmaskError, match="no runs on PACS"):
        why(runs, "PACS")


def test_compact_records_give_the_same_tables_and_answers(runs: list[RunRecord], tmp_path: Path) -> None:
    small = compact(runs, 100)
    kept, all_ = (sum(len(run.steps) for run in some) for some in (small, runs))
    assert kept < 0.6 * all_
    write_archive(small, tmp_path / "small.records.parquet")
    again = read_runs(tmp_path / "small.records.parquet")
    assert render(build_report(again, list(RULES))) == render(build_report(runs, list(RULES)))
    assert tie_breaking(again, "Toy").rows == tie_breaking(runs, "Toy").rows
    assert evaluation_frequency(again, "Toy", (100, 200)).rows == evaluation_frequency(runs, "Toy", (100, 200)).rows
    assert tau_range(again, "Toy").rows == tau_range(runs, "Toy").rows


def test_compact_records_keep_what_averages_and_metrics_are_selected_by(tmp_path: Path) -> None:
    curves = [name for average in ("sma", "swad") for name in average_metrics(average, 3)]
    options = {"averages": "sma,swad"}
    averaged = made_up_sweep(["ERM"], checkpoints=41, pairs=True, metrics=[*curves, "penalty"], options=options)
    for run in averaged:  # SWAD is evaluated once, at the end
        run.metrics.update({name: np.where(np.arange(41) < 40, np.nan, run.metrics[name]) for name in curves[7:]})
    write_archive(compact(averaged, 12_000), tmp_path / "averaged.records.parquet")
    small = read_runs(tmp_path / "averaged.records.parquet")
    rules = [name for name in RULES if name != "common-signal"]
    assert "ERM + SWAD" in render(build_report(averaged, rules))
    assert render(build_report(small, rules)) == render(build_report(averaged, rules))
    assert sum(len(run.steps) for run in small) < 0.6 * sum(len(run.steps) for run in averaged)
    assert not any({"loss", "penalty"} & run.metrics.keys() for run in small)
    f1 = [f"f1/{split}/{env}" for split in ("in", "out") for env in range(3)]
    judged = made_up_sweep(["ERM"], checkpoints=41, metrics=[*f1, "held_out_coherence", "held_out_loss"])
    for names, select_by in ((None, "f1"), (["common-signal"], "accuracy")):
        chosen = rule_names(names, select_by)
        assert render(build_report(compact(judged, 12_000), chosen)) == render(build_report(judged, chosen))


def test_unfinished_runs_are_kept_whole_and_empty_ones_pass() -> None:
    running = made_up_run([[0.5, 0.5]] * 9, status="running")
    empty = made_up_run([[0.5, 0.5]], status="diverged").at(slice(0))
    assert [len(run.steps) for run in compact([running, empty], 400)] == [9, 0]
