"""The report's data: every cell against the records, and what is missing named."""

from dataclasses import replace

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import Cell, RuleReport, Table, build_report, cell_text, grids
from sandmask.reports._data import Parts
from sandmask.reports._tables import averages_table, best_cells, best_method
from sandmask.selection import RULES, select


def report(runs: list[RunRecord], rule: str = "training-domain", **options: object) -> RuleReport:
    return build_report(runs, [rule], **options).rules[0]  # type: ignore[arg-type]


def table(runs: list[RunRecord], rule: str = "training-domain", **options: object) -> Table:
    (found,) = report(runs, rule, **options).datasets.values()
    return found


def without(runs: list[RunRecord], algorithm: str, env: int, trial: int, draw: int) -> list[RunRecord]:
    key = (algorithm, (env,), trial, draw)
    return [
        run
        for run in runs
        if (run.spec.algorithm, run.spec.test_envs, run.spec.trial_seed, run.spec.hparams_seed) != key
    ]


@pytest.mark.parametrize("rule", list(RULES))
def test_cells_are_means_over_what_each_trial_selects(rule: str) -> None:
    runs = made_up_sweep(["SANDMask", "ERM"], environments=3, trials=3, pairs=True, metrics=RULES[rule].needs_metrics)
    found = report(runs, rule)
    toy = found.datasets["Toy"]
    assert (toy.methods, toy.columns) == (("ERM", "SANDMask"), ("0", "1", "2"))
    for method in toy.methods:
        values = np.zeros((3, 3))
        for env in range(3):
            for trial in range(3):
                group = [r for r in runs if (r.spec.algorithm, r.spec.trial_seed) == (method, trial)]
                chosen = select(RULES[rule], group, env)
                assert chosen is not None
                values[env, trial] = 100 * chosen.test_accuracy
            cell = toy.cells[method, str(env)]
            assert cell.complete
            assert cell.mean == pytest.approx(values[env].mean())
            assert cell.error == pytest.approx(values[env].std() / np.sqrt(3))
            assert cell.values == pytest.approx(values[env])
            assert cell.interval is None  # three trials cannot support one
        assert toy.averages[method].mean == pytest.approx(values.mean())
        assert toy.averages[method].error is None
        assert found.averages is not None
        average = found.averages.cells[method, "Toy"]
        assert average.mean == pytest.approx(values.mean())
        assert average.error == pytest.approx(values.mean(axis=0).std() / np.sqrt(3))


def test_enough_trials_give_a_cell_an_interval() -> None:
    cell = table(made_up_sweep(["ERM"], trials=6)).cells["ERM", "0"]
    assert cell.interval is not None
    low, high = cell.interval
    assert min(cell.values) - 1e-9 <= low <= high <= max(cell.values) + 1e-9


def test_a_comparison_of_two_pairs_shows_no_interval_and_says_why() -> None:
    runs = made_up_sweep(["ERM", "IRM"], environments=2, trials=1)
    statistics = grids(build_report(runs))[-1]
    assert statistics.rows[1][4:] == ("-", statistics.rows[1][5], "2")
    assert "Fewer than 6 pairs cannot support a 95% interval" in statistics.notes[0]


def test_a_missing_run_makes_a_cell_provisional_and_is_named() -> None:
    runs = made_up_sweep(["ERM", "IRM"], draws=4, trials=2)
    found = table(without(runs, "IRM", 1, 0, 3))
    cell = found.cells["IRM", "1"]
    assert (cell.have, cell.expected, cell.complete) == (7, 8, False)
    assert cell.mean is not None
    gaps = [gap for trial in cell.trials for gap in trial.gaps]
    assert [(gap.trial_seed, gap.hparams_seed, gap.why) for gap in gaps] == [(0, 3, "")]
    assert not found.averages["IRM"].complete
    assert found.averages["ERM"].complete
    assert found.cells["IRM", "0"].complete


def test_an_unfinished_run_is_missing_and_its_numbers_are_not_used() -> None:
    runs = made_up_sweep(["ERM"], draws=2, trials=1)
    best = made_up_run([[1.0, 1.0, 1.0]] * 2, hparams_seed=1, status="running", steps=5001, hparams={"lr": 0.002})
    runs = [replace(best, spec=replace(r.spec)) if r.spec.hparams_seed == 1 else r for r in runs]
    cell = table(runs).cells["ERM", "0"]
    assert (cell.have, cell.expected) == (1, 2)
    assert cell.trials[0].gaps[0].why == "at step 100 of 401"
    assert cell.mean != 100


def test_an_average_without_a_column_is_over_the_others_and_says_so() -> None:
    runs = [r for r in made_up_sweep(["ERM", "IRM"]) if (r.spec.algorithm, r.spec.test_envs) != ("IRM", (1,))]
    found = report(runs)
    toy = found.datasets["Toy"]
    assert toy.cells["IRM", "1"].mean is None
    some = [toy.cells["IRM", env].mean or 0 for env in ("0", "2")]
    assert found.averages is not None
    for average in (toy.averages["IRM"], found.averages.cells["IRM", "Toy"]):
        assert average.mean == pytest.approx(np.mean(some))
        assert average.error is None
        assert not average.complete
        assert (average.have, average.expected) == (16, 24)
        assert cell_text(average) == f"{average.mean:.1f} (2/3 environments, 16/24 runs)"
    assert toy.averages["ERM"].complete
    assert cell_text(toy.averages["ERM"]) == f"{toy.averages['ERM'].mean:.1f}"


def test_an_average_with_a_trial_missing_is_over_what_is_there_and_has_no_error() -> None:
    runs = made_up_sweep(["ERM"], draws=1, trials=3)
    found = report(without(runs, "ERM", 0, 2, 0))
    toy = found.datasets["Toy"]
    assert found.averages is not None
    cell = found.averages.cells["ERM", "Toy"]
    assert cell.mean == pytest.approx(np.mean([toy.cells["ERM", env].mean or 0 for env in "012"]))
    assert (cell.error, cell.complete) == (None, False)
    assert cell_text(cell).endswith(" (8/9 runs)")


def test_a_sweep_of_some_environments_has_an_average_over_those() -> None:
    runs = [run for run in made_up_sweep(["ERM"], environments=4) if run.spec.test_envs in ((1,), (2,))]
    found = report(runs)
    toy = found.datasets["Toy"]
    assert toy.columns == ("1", "2")
    assert toy.notes == ("No run holds out 0, 3 alone.",)
    mean = np.mean([toy.cells["ERM", env].mean or 0 for env in toy.columns])
    assert cell_text(toy.averages["ERM"]) == f"{mean:.1f} (2/4 environments)"
    assert found.averages is not None
    cell = found.averages.cells["ERM", "Toy"]
    assert cell.error is not None  # every trial has both
    assert cell_text(cell) == f"{mean:.1f} ± {cell.error:.1f} (2/4 environments)"
    assert not cell.complete
    assert cell_text(found.averages.averages["ERM"]) == f"{mean:.1f} (in part)"


def test_how_much_is_expected_can_be_said() -> None:
    runs = made_up_sweep(["ERM"], draws=4, trials=2)
    assert table(runs).cells["ERM", "0"].expected == 8
    cell = table(runs, draws=20, trials=3).cells["ERM", "0"]
    assert (cell.have, cell.expected) == (8, 60)


def test_diverged_runs_are_marked_and_not_missing() -> None:
    runs = made_up_sweep(["ERM"], draws=2, trials=1)
    runs[0] = replace(runs[0], status="diverged", diverged_at=250)
    for rule in ("training-domain", "oracle"):
        cell = table(runs, rule).cells["ERM", "0"]
        assert (cell.have, cell.expected, cell.diverged) == (2, 2, 1)
        assert cell.trials[0].diverged == ("trial 0 draw 0 at step 250",)
    all_diverged = [replace(run, status="diverged", diverged_at=250) for run in runs]
    assert table(all_diverged, "oracle").cells["ERM", "0"].mean is None


def test_leaving_one_out_says_which_pair_it_lacks() -> None:
    runs = made_up_sweep(["ERM"], draws=1, trials=1, pairs=True)
    lacking = [run for run in runs if run.spec.test_envs != (0, 2)]
    cell = table(lacking, "leave-one-domain-out").cells["ERM", "0"]
    assert (cell.have, cell.mean) == (0, None)
    assert cell.trials[0].gaps[0].why == "no run holds out 2 as well"
    unfinished = [replace(r, status="running") if r.spec.test_envs == (0, 2) else r for r in runs]
    gap = table(unfinished, "leave-one-domain-out").cells["ERM", "0"].trials[0].gaps[0]
    assert gap.why == "with 2 at step 400 of 401"
    single = report(made_up_sweep(["ERM"]), "leave-one-domain-out")
    assert (single.datasets, single.averages) == ({}, None)
    assert single.notes == ("Toy: no run holds out two environments, which this rule needs.",)


def test_columns_are_what_the_records_hold_out() -> None:
    runs = made_up_sweep(["ERM"], environments=17, draws=1, trials=1, dataset="Spirals")
    everything = table(runs)
    assert everything.columns == tuple(str(env) for env in range(17))
    assert everything.averages["ERM"].expected == 17
    protocol = table([run for run in runs if run.spec.test_envs != (16,)])
    assert protocol.columns == tuple(str(env) for env in range(16))
    assert protocol.averages["ERM"].complete  # sixteen is all that the protocol holds out
    assert protocol.notes == ()


def test_different_settings_are_different_rows() -> None:
    runs = made_up_sweep(["ERM", "SANDMask"])
    released = [
        replace(run, spec=replace(run.spec, options={"form": "released"}))
        for run in runs
        if run.spec.algorithm == "SANDMask"
    ]
    found = table([*runs, *released])
    assert found.methods == ("ERM", "SANDMask", "SANDMask (form=released)")
    assert all(cell.complete for cell in found.cells.values())


def test_a_method_that_skipped_a_dataset_has_a_blank_and_an_average_over_the_others() -> None:
    runs = made_up_sweep(["ERM", "IRM"]) + made_up_sweep(["ERM"], dataset="Two")
    averages = report(runs).averages
    assert averages is not None
    assert averages.cells["IRM", "Two"] == Cell(mean=None)
    assert averages.averages["IRM"].mean == averages.cells["IRM", "Toy"].mean
    assert cell_text(averages.averages["IRM"]).endswith(" (1/2 datasets)")
    assert averages.averages["ERM"].complete


def test_datasets_and_methods_come_in_the_papers_order_and_then_by_name() -> None:
    runs = [
        run
        for name in ("PACS", "Toy-16", "Toy-4", "Toy", "Spirals")
        for run in made_up_sweep(["Zeta", "SANDMask", "ERM", "Alpha"], dataset=name)
    ]
    found = report(runs)
    assert list(found.datasets) == ["Spirals", "PACS", "Toy", "Toy-4", "Toy-16"]
    assert found.datasets["Toy"].methods == ("ERM", "SANDMask", "Alpha", "Zeta")


def test_statistics_pair_environments_and_trials() -> None:
    runs = made_up_sweep(["ERM", "IRM", "VREx"], environments=3, trials=2) + made_up_sweep(
        ["ERM", "IRM"], dataset="Two"
    )
    statistics = report(runs).statistics
    assert statistics is not None
    assert statistics.baseline == "ERM"
    by_scope = {(item.scope, item.method): item for item in statistics.comparisons}
    toy = table([run for run in runs if run.spec.dataset == "Toy"])
    ours = [toy.cells["IRM", str(env)].values[trial] for env in range(3) for trial in range(2)]
    base = [toy.cells["ERM", str(env)].values[trial] for env in range(3) for trial in range(2)]
    against = by_scope["Toy", "IRM"].against_baseline
    assert against is not None
    assert against.pairs == 6
    assert against.difference == pytest.approx(np.mean(ours) - np.mean(base))
    assert by_scope["Toy", "ERM"].against_baseline is None
    everything = by_scope["all", "IRM"].against_baseline
    assert everything is not None
    assert everything.pairs == 12
    ranks = [by_scope["Toy", method].mean_rank for method in ("ERM", "IRM", "VREx")]
    assert sum(rank for rank in ranks if rank is not None) == pytest.approx(6)
    assert by_scope["all", "VREx"].mean_rank is None  # it has not all of them
    assert by_scope["all", "ERM"].mean_rank is not None
    assert set(statistics.critical_differences) == {"Toy", "Two", "all"}


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    assert report(made_up_sweep(["IRM", "VREx"])).statistics is None
    assert report(made_up_sweep(["ERM"])).statistics is None
    assert report(made_up_sweep(["IRM", "VREx"]), baseline="VREx").statistics is not None


def test_a_baseline_that_was_asked_for_has_to_be_there() -> None:
    with pytest.raises(SandmaskError, match=r"No run has the baseline method 'VREX'. Did you mean 'VREx'\?"):
        report(made_up_sweep(["IRM", "VREx"]), baseline="VREX")


def test_mistakes_are_named() -> None:
    with pytest.raises(SandmaskError, match="no runs to report"):
        build_report([])
    with pytest.raises(SandmaskError, match="Did you mean 'oracle'"):
        build_report(made_up_sweep(["ERM"]), ["orakle"])
    renamed = made_up_run([[0.5, 0.5, 0.5]], env_names=["a", "b", "c"], seed=77)
    with pytest.raises(SandmaskError, match="'Toy' name different environments: 0, 1, 2 and a, b, c"):
        build_report([*made_up_sweep(["ERM"]), renamed])


def test_nothing_to_show_is_still_a_grid() -> None:
    (only,) = grids(build_report(made_up_sweep(["ERM"]), ["leave-one-domain-out"]))
    assert (only.header, only.rows) == ((), ())


def best(cells: dict[str, Cell], chance: float | None = None) -> str | None:
    return best_method(cells, chance)


def test_the_best_of_a_column_is_alone_and_above_chance() -> None:
    cell = Cell(mean=61.24, have=1, expected=1)
    assert best({"a": cell, "b": replace(cell, mean=60.0)}) == "a"
    assert best({"a": cell, "b": replace(cell, mean=61.16)}) is None  # both print as 61.2
    assert best({"a": cell, "b": replace(cell, mean=60.0)}, chance=61.2) is None
    assert best({"a": cell, "b": replace(cell, mean=60.0)}, chance=50.0) == "a"
    assert best({"a": cell, "b": Cell(mean=None)}) is None  # nothing to compare with
    assert best({"a": cell, "b": replace(cell, mean=float("nan"))}) is None


def test_averages_over_fewer_columns_do_not_compete() -> None:
    def average(mean: float, found: int) -> Cell:
        return Cell(mean=mean, have=1, expected=1, parts=Parts(found, 3, "environments"))

    assert best({"a": average(90, 1), "b": average(60, 3), "c": average(50, 3)}) == "b"
    assert best({"a": average(90, 1), "b": average(60, 3)}) is None


def test_averages_over_different_columns_do_not_compete() -> None:
    """ERM holds out 0 and 1, IRM 1 and 2: their averages are over as many columns, but not over the same."""
    runs = [
        made_up_run([[accuracy] * 3], test_envs=[env], algorithm=algorithm)
        for algorithm, accuracy, envs in (("ERM", 0.9, (0, 1)), ("IRM", 0.8, (1, 2)))
        for env in envs
    ]
    found = table(runs)
    assert found.averages["IRM"].parts == Parts(2, 3, "environments", columns=("1", "2"))
    assert best_cells(found) == {("ERM", "1")}
    over_datasets = averages_table({"Toy": found})
    assert over_datasets.averages["ERM"].parts == Parts(1, 1, "datasets", in_part=True, columns=("Toy (0, 1)",))
    assert best_cells(over_datasets) == set()


def test_numbers_at_chance_are_not_best_in_any_table() -> None:
    runs = [
        made_up_run([[accuracy] * 2], test_envs=[env], algorithm=algorithm)
        for algorithm, accuracy in (("ERM", 0.5), ("IRM", 0.4))
        for env in range(2)
    ]
    assert best_cells(table(runs)) == set()
    unnamed = [replace(run, classes=()) for run in runs]
    assert best_cells(table(unnamed)) == {("ERM", "0"), ("ERM", "1"), ("ERM", None)}


def test_nothing_is_compared_where_no_run_can_be_selected() -> None:
    rule = RULES["common-signal"]
    runs = made_up_sweep(["ERM", "VREx"], environments=3, metrics=rule.needs_metrics)
    titles = [grid.title for grid in grids(build_report(runs, [rule.name]))]
    assert any(title.startswith("Compared with") for title in titles)
    constant = {name: np.full(len(runs[0].steps), np.nan) for name in rule.needs_metrics}
    nothing = [replace(run, metrics=constant) for run in runs]
    titles = [grid.title for grid in grids(build_report(nothing, [rule.name]))]
    assert titles
    assert not any(title.startswith("Compared with") for title in titles)
