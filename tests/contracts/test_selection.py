"""What holds for every registered selection rule, a user's own included."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.selection import RULES, Choice, candidates, select, selection_rule

TEST_ENV = 1


@pytest.fixture(params=[*RULES, "first-checkpoint"])
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    if request.param not in RULES:

        @selection_rule("first-checkpoint", "no training at all")
        def first(run: RunRecord) -> Choice:
            return Choice(0, (float(run.accuracy_out[0, list(run.train_envs)].max()),))

    return str(request.param)


METRICS = sorted({name for entry in RULES.values() for name in entry.needs_metrics})


def sweep(seed: int = 0) -> list[RunRecord]:
    return made_up_sweep(["ERM"], environments=4, draws=6, trials=1, pairs=True, size=9, seed=seed, metrics=METRICS)


def outcome(rule: str, runs: Sequence[RunRecord]) -> tuple[str, int]:
    selected = select(RULES[rule], runs, TEST_ENV)
    assert selected is not None
    return selected.run.spec.id, selected.index


def copy(run: RunRecord) -> RunRecord:
    return replace(run, accuracy_in=run.accuracy_in.copy(), accuracy_out=run.accuracy_out.copy())


def test_the_entry_says_what_it_does(rule: str) -> None:
    entry = RULES[rule.upper().replace("-", "_")]
    assert entry.name == rule
    assert len(entry.description) > 10
    with pytest.raises(SandmaskError, match="is taken by another selection rule"):
        RULES.register(entry)


def test_a_checkpoint_of_an_eligible_run_is_chosen(rule: str) -> None:
    runs = sweep()
    selected = select(RULES[rule], runs, TEST_ENV)
    assert selected is not None
    assert selected.run.spec.test_envs == (TEST_ENV,)
    assert 0 <= selected.index < len(selected.run.steps)
    assert selected.test_accuracy == selected.run.accuracy_in[selected.index, TEST_ENV]
    assert 0 <= selected.validation <= 1
    offers = candidates(RULES[rule], runs, TEST_ENV)
    assert len(offers) == 6
    assert selected.value == max(offer.value for offer in offers)


def test_the_order_of_runs_does_not_matter(rule: str) -> None:
    for seed in range(5):
        runs = sweep(seed)
        shuffled = [runs[index] for index in np.random.default_rng(seed).permutation(len(runs))]
        assert outcome(rule, shuffled) == outcome(rule, runs)


def test_records_are_left_as_they_are(rule: str) -> None:
    runs = sweep()
    before = [copy(run) for run in runs]
    outcome(rule, runs)
    for run, kept in zip(runs, before, strict=True):
        assert np.array_equal(run.accuracy_in, kept.accuracy_in)
        assert np.array_equal(run.accuracy_out, kept.accuracy_out)


def test_only_rules_that_say_so_look_at_the_test_environment(rule: str) -> None:
    changes = 0
    for seed in range(10):
        runs = sweep(seed)
        changed = [copy(run) for run in runs]
        rng = np.random.default_rng(seed)
        for run in changed:
            run.accuracy_in[:, TEST_ENV] = rng.random(len(run.steps))
            run.accuracy_out[:, TEST_ENV] = rng.random(len(run.steps))
        changes += outcome(rule, changed) != outcome(rule, runs)
    assert (changes > 0) == RULES[rule].uses_test_data


def test_a_run_without_the_curves_that_a_rule_needs_is_not_judged(rule: str) -> None:
    bare = [replace(run, metrics={}) for run in sweep()]
    assert (select(RULES[rule], bare, TEST_ENV) is None) == bool(RULES[rule].needs_metrics)


def test_no_runs_give_nothing(rule: str) -> None:
    assert select(RULES[rule], [], TEST_ENV) is None
    assert select(RULES[rule], [made_up_run([[0.5, 0.5]], test_envs=[0])], TEST_ENV) is None
    empty = replace(
        made_up_run([[0.5, 0.5]], test_envs=[TEST_ENV]),
        steps=np.zeros(0, dtype=np.int64),
        accuracy_in=np.zeros((0, 2)),
        accuracy_out=np.zeros((0, 2)),
        status="diverged",
        diverged_at=0,
    )
    assert select(RULES[rule], [empty], TEST_ENV) is None
