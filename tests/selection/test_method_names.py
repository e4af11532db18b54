"""What a method is called: its algorithm, and the settings that tell its runs apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, split_averages
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import build_report
from sandmask.selection import algorithm_of, method_names


def methods(*specs: dict[str, Any]) -> list[str]:
    runs = [made_up_run([[0.5, 0.5]], **{"algorithm": "ERM", **spec}) for spec in specs]
    names = method_names(runs)
    return [names[run.spec.id] for run in runs]


def test_an_average_is_named_after_the_algorithm() -> None:
    assert methods({}, {"options": {"average": "sma"}}, {"options": {"average": "swad"}}) == [
        "ERM",
        "ERM + SMA",
        "ERM + SWAD",
    ]
    assert methods({"options": {"average": "ema"}}) == ["ERM + EMA"]  # also where nothing else is there


def test_schedules_and_decays_are_spoken_and_others_stand_in_brackets() -> None:
    assert methods(
        {},
        {"options": {"schedule": "cosine", "average": "sma"}},
        {"options": {"decay": "decoupled"}, "space": "domainbed"},
    ) == ["ERM (space=paper)", "ERM + SMA + cosine schedule (space=paper)", "ERM + decoupled decay (space=domainbed)"]
    assert methods({}, {"options": {"form": "released", "depth": 3}}) == ["ERM", "ERM (depth=3, form=released)"]


def test_options_that_all_runs_share_are_not_repeated_in_every_row() -> None:
    assert methods({"options": {"schedule": "cosine"}}, {"options": {"schedule": "cosine"}, "seed": 1}) == [
        "ERM",
        "ERM",
    ]


def test_an_option_of_the_optimizer_makes_a_method_where_it_was_set_by_hand() -> None:
    plain, cosine = {"hparams": {"lr": 0.1}}, {"hparams": {"lr": 0.1, "lr_final": 0.0}}
    assert methods(plain, cosine) == ["ERM", "ERM (lr_final=0.0)"]
    assert methods({"hparams": {"lr": 0.1}}, {"hparams": {"lr": 0.2}}) == ["ERM", "ERM"]  # drawn
    drawn = [{"hparams": {"lr_final": value}, "hparams_seed": draw} for draw, value in enumerate((0.0, 0.5))]
    assert methods(*drawn) == ["ERM", "ERM"]  # a space drew it: one value a draw
    trials = [
        {"hparams": {"lr_final": value}, "hparams_seed": 1, "trial_seed": i} for i, value in enumerate((0.0, 0.5))
    ]
    assert methods(*trials) == ["ERM", "ERM"]  # and another one in each trial


@pytest.mark.parametrize(
    "method", ["ERM", "ERM + SMA", "ERM (space=domainbed)", "ERM + SMA + cosine schedule (space=paper, steps=3)"]
)
def test_the_algorithm_is_found_in_a_name(method: str) -> None:
    assert algorithm_of(method) == "ERM"


def with_averages(runs: list[RunRecord], **values: float) -> list[RunRecord]:
    """The runs, with averages whose accuracies are the same everywhere."""
    made = []
    for run in runs:
        curves = {
            f"average/{name}/{split}/{env}": np.full(len(run.steps), value)
            for name, value in values.items()
            for split in ("in", "out")
            for env in range(len(run.env_names))
        }
        spec = replace(run.spec, options={"averages": ",".join(values)})
        made.append(
            replace(run, spec=spec, metrics={**run.metrics, **curves, "validation_loss": np.ones(len(run.steps))})
        )
    return made


def test_averages_that_a_run_kept_are_rows_of_their_own() -> None:
    runs = made_up_sweep(["ERM", "IRM"])
    averaged = with_averages(runs, sma=0.25, swad=0.75)
    rule = build_report(averaged, ["oracle"]).rules[0]
    toy, plain = rule.datasets["Toy"], build_report(runs, ["oracle"]).rules[0].datasets["Toy"]
    assert toy.methods == ("ERM", "ERM + SMA", "ERM + SWAD", "IRM", "IRM + SMA", "IRM + SWAD")
    assert [toy.averages[name].mean for name in toy.methods[1:3]] == [25.0, 75.0]
    assert all(
        toy.cells[key] == plain.cells[key] or toy.cells[key].mean == plain.cells[key].mean for key in plain.cells
    )
    assert rule.statistics is not None
    assert rule.statistics.baseline == "ERM"


def test_a_run_trained_with_and_without_averages_counts_once() -> None:
    run = made_up_run([[0.5, 0.5]])
    measured = replace(run, metrics={**run.metrics, "f1/out/0": np.ones(1)})
    found = list(split_averages([*with_averages([run], ema=0.5), measured]))
    assert [one.spec.options for one in found] == [{}, {"average": "ema"}]
    assert "f1/out/0" in found[0].metrics


def test_the_record_over_more_examples_counts_in_any_order() -> None:
    whole = replace(made_up_run([[0.5, 0.5]]), sizes=((20, 20), (20, 20)))
    few = replace(whole, accuracy_in=np.array([[0.5, 0.25]]), sizes=((20, 4), (20, 20)))
    for both in ([whole, *with_averages([few], ema=0.5)], [*with_averages([few], ema=0.5), whole]):
        found = {run.spec.id: run for run in split_averages(both)}[whole.spec.id]
        assert np.array_equal(found.accuracy_in, whole.accuracy_in)
        assert found.sizes == whole.sizes


def test_an_unfinished_run_does_not_hide_the_finished_one() -> None:
    run = made_up_run([[0.5, 0.5], [0.6, 0.6]])
    unfinished = replace(run.at(slice(0, 1)), status="running")
    for order in ((0, 1), (1, 0)):
        both = [with_averages([unfinished], ema=0.5)[0], run]
        found = next(split_averages([both[place] for place in order]))
        assert (found.status, len(found.steps), found.spec.id) == ("done", 2, run.spec.id)


def test_averages_beyond_all_accuracies_are_refused() -> None:
    with pytest.raises(SandmaskError, match="average 'sma' should be numbers from 0 to 1"):
        list(split_averages(with_averages([made_up_run([[0.5, 0.5]])], sma=5.0)))


def test_unknown_metrics_and_options_change_nothing() -> None:
    runs = made_up_sweep(["ERM"])
    more = [
        replace(
            run,
            spec=replace(run.spec, options={"new": {"deep": [1]}}),
            metrics={**run.metrics, "new": np.ones(len(run.steps))},
        )
        for run in runs
    ]
    assert build_report(more).rules[0].datasets["Toy"].methods == ("ERM",)
