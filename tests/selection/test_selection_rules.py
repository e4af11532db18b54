"""Each rule against a slow twin that goes through checkpoints and runs one by one, ties included."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.selection import (
    RULES,
    Choice,
    Selected,
    SelectionRule,
    by_metric,
    group_runs,
    mean_over_environments,
    method_names,
    select,
)


def slow_training_domain(run: RunRecord, test_env: int) -> tuple[int, float]:
    best: tuple[int, float] | None = None
    for index in range(len(run.steps)):
        outs = [run.accuracy_out[index, env] for env in range(len(run.env_names)) if env != test_env]
        value = float(np.mean(outs))
        if best is None or value > best[1]:
            best = (index, value)
    assert best is not None
    return best


def slow_worst(run: RunRecord, test_env: int) -> tuple[int, tuple[float, float, float]]:
    best: tuple[int, tuple[float, float, float]] | None = None
    for index in range(len(run.steps)):
        outs = [run.accuracy_out[index, env] for env in range(len(run.env_names)) if env != test_env]
        value = (float(min(outs)), float(np.mean(outs)), -float(run.steps[index]))
        if best is None or value > best[1]:
            best = (index, value)
    assert best is not None
    return best


def slow_leave_one_out(run: RunRecord, runs: list[RunRecord], test_env: int) -> tuple[int, float] | None:
    best: tuple[int, float] | None = None
    for index, step in enumerate(run.steps):
        values = []
        for env in range(len(run.env_names)):
            for other in runs:
                matches = other.spec.hparams_seed == run.spec.hparams_seed
                if matches and set(other.spec.test_envs) == {env, test_env} and env != test_env:
                    values += [other.accuracy_in[row, env] for row, at in enumerate(other.steps) if at == step]
        if len(values) != len(run.env_names) - 1:
            continue
        value = float(np.sum(values) / len(values))
        if best is None or value > best[1]:
            best = (index, value)
    return best


def slow_common_signal(run: RunRecord) -> tuple[int, float] | None:
    best: tuple[int, float] | None = None
    coherence = run.metrics["held_out_coherence"].tolist()
    for index, loss in enumerate(run.metrics["held_out_loss"].tolist()):
        near = [coherence[max(index - 1, 0)], coherence[index], coherence[min(index + 1, len(coherence) - 1)]]
        n_envs = len(run.env_names) - len(run.spec.test_envs)
        if sorted(near)[1] >= 2 / (n_envs + 1) and (best is None or np.exp(-loss) > best[1]):
            best = (index, float(np.exp(-loss)))
    return best


def slow_select(rule: str, runs: list[RunRecord], test_env: int) -> tuple[str, int, float] | None:
    """As DomainBed's collector goes about it: best of each draw, stable sort by value, read from the end."""
    offers = []
    for run in sorted(runs, key=lambda run: run.spec.hparams_seed):
        if run.spec.test_envs != (test_env,) or run.status == "running":
            continue
        if rule == "training-domain":
            offer: tuple[int, object] | None = slow_training_domain(run, test_env)
        elif rule == "oracle":
            done = run.status == "done"
            offer = (len(run.steps) - 1, float(run.accuracy_out[-1, test_env])) if done else None
        elif rule == "worst-training-domain":
            offer = slow_worst(run, test_env)
        elif rule == "common-signal":
            offer = slow_common_signal(run)
        else:
            offer = slow_leave_one_out(run, runs, test_env)
        if offer is not None:
            offers.append((run, offer[0], offer[1]))
    if not offers:
        return None
    run, index, _ = sorted(offers, key=lambda offer: offer[2])[::-1][0]  # type: ignore[arg-type, return-value]
    return run.spec.id, index, float(run.accuracy_in[index, test_env])


@pytest.mark.parametrize("rule", list(RULES))
@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 12), environments=st.integers(2, 10), seed=st.integers(0, 999))
def test_a_rule_chooses_what_its_slow_twin_chooses(rule: str, size: int, environments: int, seed: int) -> None:
    runs = made_up_sweep(
        ["ERM"],
        environments=environments,
        draws=3,
        trials=1,
        checkpoints=4,
        size=size,
        seed=seed,
        pairs=True,
        metrics=RULES[rule].needs_metrics,
    )
    for test_env in range(min(environments, 3)):
        chosen = select(RULES[rule], runs, test_env)
        if rule == "common-signal" and environments == 2:  # a single environment has nobody to share a signal with
            assert chosen is None
            assert slow_select(rule, runs, test_env) is None
            continue
        assert chosen is not None
        assert (chosen.run.spec.id, chosen.index, chosen.test_accuracy) == slow_select(rule, runs, test_env)
        assert chosen.step == chosen.run.steps[chosen.index]
        assert chosen.validation == chosen.value[0]


def offered(*tables: list[list[float]]) -> list[RunRecord]:
    return [made_up_run(table, hparams_seed=draw) for draw, table in enumerate(tables)]


def chosen(rule: str, runs: list[RunRecord]) -> Selected:
    selected = select(RULES[rule], runs, 0)
    assert selected is not None
    return selected


def test_ties_between_checkpoints_go_to_the_earliest() -> None:
    for rule in ("training-domain", "worst-training-domain"):
        assert chosen(rule, offered([[0.1, 0.5], [0.2, 0.9], [0.3, 0.9]])).index == 1


def test_ties_between_runs_go_to_the_highest_draw() -> None:
    runs = offered([[0.1, 0.9]], [[0.2, 0.9]], [[0.3, 0.8]])
    for rule in ("training-domain", "worst-training-domain"):
        assert chosen(rule, runs).run.spec.hparams_seed == 1
        assert chosen(rule, runs[::-1]).run.spec.hparams_seed == 1
    assert chosen("oracle", offered([[0.7, 0.1]], [[0.7, 0.2]], [[0.1, 1.0]])).run.spec.hparams_seed == 1


def test_the_worst_domain_rule_breaks_ties_by_mean_then_by_the_earlier_step() -> None:
    mean_decides = offered([[0.0, 0.5, 0.6], [0.0, 0.5, 0.7]])
    assert chosen("worst-training-domain", mean_decides).index == 1
    earlier_run_decides = offered([[0.0, 0.5, 0.7]], [[0.0, 0.1, 0.1], [0.0, 0.5, 0.7]])
    assert chosen("worst-training-domain", earlier_run_decides).run.spec.hparams_seed == 0
    assert chosen("training-domain", earlier_run_decides).run.spec.hparams_seed == 1


def test_the_oracle_looks_at_last_checkpoints_only() -> None:
    assert chosen("oracle", offered([[1.0, 0.5], [0.2, 0.5]], [[0.0, 0.5], [0.3, 0.5]])).test_accuracy == 0.3


def test_a_diverged_run_offers_its_checkpoints_but_no_last_one() -> None:
    runs = [made_up_run([[0.3, 0.9]], status="diverged"), made_up_run([[0.2, 0.1]], hparams_seed=1)]
    assert chosen("training-domain", runs).test_accuracy == 0.3
    assert chosen("oracle", runs).test_accuracy == 0.2
    assert select(RULES["oracle"], runs[:1], 0) is None


@pytest.mark.parametrize("rule", list(RULES))
def test_an_unfinished_run_is_not_eligible(rule: str) -> None:
    runs = [replace(run, status="running") for run in made_up_sweep(["ERM"], pairs=True, trials=1)]
    assert select(RULES[rule], runs, 0) is None


@pytest.mark.parametrize(("metric", "values"), [("f1", [np.nan, 0.0]), ("ece", [np.nan, 1.0]), ("ece", [0.2, 0.1])])
def test_a_metric_that_is_not_known_is_never_the_best(metric: str, values: list[float]) -> None:
    run = made_up_run([[0.5, 0.5], [0.5, 0.5]])
    curves = {f"{metric}/{split}/{env}": np.array(values) for split in ("in", "out") for env in range(2)}
    selected = select(by_metric(RULES["training-domain"], metric), [replace(run, metrics=curves)], 0)
    assert selected is not None
    assert selected.index == 1


def test_leaving_one_out_needs_every_sibling() -> None:
    runs = made_up_sweep(["ERM"], pairs=True, draws=1, trials=1)
    rule = RULES["leave-one-domain-out"]
    assert select(rule, runs, 0) is not None
    without = [run for run in runs if run.spec.test_envs != (0, 2)]
    assert select(rule, without, 0) is None
    assert select(rule, without, 1) is not None
    twice = [*runs, replace(runs[-1], spec=replace(runs[-1].spec, seed=12345))]
    assert select(rule, twice, 2) is None  # which of the two siblings would count?
    other = [
        replace(run, spec=replace(run.spec, hparams={"lr": 0.5})) if run.spec.test_envs == (0, 2) else run
        for run in runs
    ]
    assert select(rule, other, 0) is None  # the same draw of another space is no sibling


@pytest.mark.parametrize("rule", list(RULES))
def test_a_run_that_holds_out_everything_cannot_be_judged(rule: str) -> None:
    assert select(RULES[rule], [made_up_run([[0.5], [0.6]], test_envs=[0])], 0) is None


def test_leaving_one_out_uses_the_steps_that_all_siblings_reached() -> None:
    runs = made_up_sweep(["ERM"], environments=3, pairs=True, draws=1, trials=1, checkpoints=5, size=997)
    short = [
        replace(
            run,
            status="diverged",
            steps=run.steps[:2],
            accuracy_in=run.accuracy_in[:2],
            accuracy_out=run.accuracy_out[:2],
        )
        if run.spec.test_envs == (0, 1)
        else run
        for run in runs
    ]
    selected = select(RULES["leave-one-domain-out"], short, 0)
    assert selected is not None
    twin = slow_leave_one_out(next(run for run in short if run.spec.test_envs == (0,)), short, 0)
    assert (selected.index, selected.validation) == twin
    assert selected.index < 2


@given(st.integers(1, 40), st.integers(0, 10_000))
def test_means_are_bitwise_those_of_a_list(environments: int, seed: int) -> None:
    table = np.random.default_rng(seed).random((6, environments + 3))
    columns = [1 + index for index in range(environments)]
    for layout in (table, np.asfortranarray(table)):
        means = mean_over_environments(layout[:, columns])
        assert [float(value) for value in means] == [float(np.mean([row[c] for c in columns])) for row in table]


def test_methods_are_told_apart_by_settings_and_not_by_draws() -> None:
    runs = made_up_sweep(["ERM", "SANDMask"], draws=2, trials=1)
    assert set(method_names(runs).values()) == {"ERM", "SANDMask"}
    wide = [replace(run, spec=replace(run.spec, space="domainbed")) for run in runs if run.spec.algorithm != "ERM"]
    option = [replace(runs[0], spec=replace(runs[0].spec, options={"rescale": True}))]
    elsewhere = [made_up_run([[0.5, 0.5]], dataset="Other", network="resnet50", steps=9)]
    assert set(method_names([*runs, *wide, *option, *elsewhere]).values()) == {
        "ERM",
        "ERM (rescale=true)",
        "SANDMask (space=paper)",
        "SANDMask (space=domainbed)",
    }


def test_groups_hold_what_competes() -> None:
    runs = made_up_sweep(["ERM", "IRM"], pairs=True, draws=2, trials=2, environments=3)
    groups = group_runs(runs)
    assert len(groups) == 2 * 2 * 3
    for key, group in groups.items():
        assert len(group) == 2 * 3  # two draws of: alone, and with each of the two others
        assert all(key.test_env in run.spec.test_envs for run in group)
        assert {(run.spec.algorithm, run.spec.trial_seed) for run in group} == {(key.method, key.trial_seed)}
    assert list(groups) == sorted(groups)


def test_choices_compare_by_their_values_in_order() -> None:
    assert Choice(0, (0.5, 1.0)).value < Choice(0, (0.5, 2.0)).value


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_that_a_rule_values_nan_is_not_selected(first: int) -> None:
    rule = SelectionRule("mine", "", lambda run, _: Choice(0, (np.nan if run.spec.hparams_seed == first else 0.5,)))
    runs = made_up_sweep(["ERM"], draws=2, trials=1)
    chosen = select(rule, [run for run in runs if run.spec.test_envs == (0,)], 0)
    assert chosen is not None
    assert chosen.run.spec.hparams_seed == 1 - first
