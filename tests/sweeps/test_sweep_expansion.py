"""From a request to runs, and from runs to stacks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DATASETS
from sandmask.errors import SandmaskError
from sandmask.hparams import seed_hash
from sandmask.sweeps import SweepSpec, expand, group, run_seed
from sandmask.sweeps._expand import normalized
from sandmask.training import make_spec, stack_key

Make = Callable[..., SweepSpec]


def test_every_combination_once() -> None:
    sweep = SweepSpec(("Spirals",), ("ERM", "IRM", "ANDMask", "SANDMask"))
    runs = expand(sweep).runs
    assert len(runs) == len({run.id for run in runs}) == 4 * 16 * 20 * 3  # the paper's Spirals table
    assert {run.test_envs for run in runs} == {(env,) for env in range(16)}
    assert Counter(run.algorithm for run in runs) == dict.fromkeys(sweep.algorithms, 16 * 60)


def test_all_algorithms_are_those_that_are_registered() -> None:
    every = normalized(SweepSpec(("Spirals",), ("all",)))
    assert every.algorithms == tuple(entry.name for entry in ALGORITHMS.values())
    assert len(every.algorithms) >= 50
    assert normalized(every) == every  # the names are stored, so that a later version trains the same methods


def test_a_run_is_what_make_spec_says(small_sweep: Make) -> None:
    (run,) = [
        run
        for run in expand(small_sweep(n_trials=2)).runs
        if (run.algorithm, run.test_envs, run.hparams_seed, run.trial_seed) == ("SANDMask", (2,), 1, 1)
    ]
    assert run == make_spec(
        DATASETS["DebugVector"],
        "SANDMask",
        [2],
        steps=7,
        checkpoint_every=3,
        hparams={"mlp_width": 8, "batch_size": 8, "tau": 0.3},
        hparams_seed=1,
        trial_seed=1,
        seed=seed_hash("DebugVector", "SANDMask", [2], 1, 1),
    )


def test_seeds_differ_between_runs_and_with_the_sweeps_own(small_sweep: Make) -> None:
    runs = expand(small_sweep(n_trials=2)).runs
    assert len({run.seed for run in runs}) == len(runs)
    others = expand(small_sweep(n_trials=2, seed=1)).runs
    assert not {run.seed for run in runs} & {run.seed for run in others}
    assert run_seed("A", "B", (0,), 1, 2) == seed_hash("A", "B", [0], 1, 2)  # DomainBed's


def test_an_override_goes_to_the_algorithms_that_have_it(small_sweep: Make) -> None:
    runs = expand(small_sweep()).runs
    assert {run.hparams["tau"] for run in runs if run.algorithm == "SANDMask"} == {0.3}
    assert all("tau" not in run.hparams for run in runs if run.algorithm == "ERM")
    with pytest.raises(
        SandmaskError, match=r"No algorithm of the sweep has a hyperparameter 'taau'\. Did you mean 'tau'"
    ):
        expand(small_sweep(hparams={"taau": 1}))


def test_pairs_are_planned_for_the_rule_that_needs_them_and_shared() -> None:
    sweep = SweepSpec(("RotatedMNIST",), ("ERM",), n_hparams=1, n_trials=1, selection=("leave-one-domain-out",))
    held_out = Counter(run.test_envs for run in expand(sweep).runs)
    assert held_out == dict.fromkeys([(env,) for env in range(6)] + list(combinations(range(6), 2)), 1)
    some = SweepSpec(("RotatedMNIST",), ("ERM",), test_envs=("0", "30"), n_hparams=1, n_trials=1, selection=("all",))
    pairs = {run.test_envs for run in expand(some).runs if len(run.test_envs) == 2}
    assert pairs == {pair for pair in combinations(range(6), 2) if {0, 2} & set(pair)}
    spirals = SweepSpec(("Spirals",), ("ERM",), test_envs=("3",), n_hparams=1, n_trials=1, selection=("all",))
    assert len(expand(spirals).runs) == 1 + 16  # the environment that no table reports is a second one all the same


def test_a_name_and_a_number_of_the_same_environment_are_told(small_sweep: Make) -> None:
    """Names take precedence: of domains 1, 2 and 3, number 1 is the first one."""
    with pytest.raises(SandmaskError, match=r"are the same: 0 is 'a', a is 'a'\."):
        expand(small_sweep(test_envs=("0", "a")))


def test_too_few_environments_for_pairs_are_said(small_sweep: Make) -> None:
    expansion = expand(small_sweep(selection=("all",)))
    assert all(len(run.test_envs) == 1 for run in expansion.runs)
    assert "DebugVector: holding out two of its 3 environments" in expansion.notes[0]


def test_methods_whose_draws_mostly_end_before_their_penalty_starts_are_noted() -> None:
    """RDM starts its penalty at step U(800, 2700), IRM at step 10^U(0, 4)."""
    methods = ("ERM", "RDM", "SANDMask+IRM")
    sweep = SweepSpec(("Spirals",), methods, test_envs=("0",), n_hparams=9, n_trials=1, space="paper")
    expansion = expand(replace(sweep, steps=1001))
    late = sum(run.hparams.get("rdm_penalty_anneal_iters", 0) > 1000 for run in expansion.runs)
    assert 5 <= late < 9
    (note,) = expansion.notes
    assert note.startswith(
        f"RDM on Spirals: in {late} of 9 draws, rdm_penalty_anneal_iters is not reached in 1,001 steps"
    )
    assert len(expand(replace(sweep, steps=41)).notes) == 2
    assert not expand(replace(sweep, steps=5001)).notes


def test_a_sweep_that_is_too_short_for_its_averages_is_noted_once(small_sweep: Make) -> None:
    sweep = small_sweep(averages=("sma", "ema"), n_trials=2)
    (note,) = expand(replace(sweep, steps=101)).notes
    assert note.startswith("--average sma leaves out the first 100 steps")
    assert not expand(replace(sweep, steps=102)).notes
    assert not expand(replace(sweep, steps=101, averages=("ema",))).notes


def test_stacks_hold_what_can_be_one_program(small_sweep: Make) -> None:
    runs = expand(small_sweep(n_trials=2)).runs
    stacks = group(runs, lambda _: 100)
    assert sorted(run.id for stack in stacks for run in stack.specs) == sorted(run.id for run in runs)
    for stack in stacks:
        assert len({stack_key(run) for run in stack.specs}) == 1
    assert len({stack.id for stack in stacks}) == len(stacks)


def test_stacks_keep_to_the_cap_and_are_even(small_sweep: Make) -> None:
    runs = expand(small_sweep(n_trials=3, hparams={"mlp_width": 8, "batch_size": 8, "mlp_depth": 3})).runs
    stacks = group(runs, lambda _: 7)
    sizes = [len(stack.specs) for stack in stacks]
    assert max(sizes) <= 7
    assert max(sizes) - min(sizes) <= 1
    assert [stack.id for stack in group(reversed(runs), lambda _: 7)] == [stack.id for stack in stacks]


def test_the_order_gives_a_table_early(small_sweep: Make) -> None:
    stacks = group(expand(small_sweep(n_hparams=3, n_trials=2)).runs, lambda _: 3)
    turns = [min((run.trial_seed, run.hparams_seed) for run in stack.specs) for stack in stacks]
    assert turns == sorted(turns)
    assert {stack.specs[0].algorithm for stack in stacks[:2]} == {"ERM", "SANDMask"}


def test_large_networks_train_alone() -> None:
    sweep = SweepSpec(("PACS",), ("ERM",), n_hparams=1, n_trials=2)
    stacks = group(expand(sweep).runs, lambda _: 100)
    assert [len(stack.specs) for stack in stacks] == [1] * 8


@pytest.mark.parametrize("changes", [{"n_hparams": 10**12}, {"n_trials": 10**9}, {"n_hparams": 10**5, "n_trials": 10}])
def test_a_sweep_that_no_memory_holds_is_refused_before_it_is_expanded(
    small_sweep: Make, changes: dict[str, int]
) -> None:
    with pytest.raises(SandmaskError, match=r"The sweep has [0-9,]+ runs .*; the limit is 1,000,000"):
        expand(small_sweep(**changes))


def test_words_for_weights_are_not_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = SweepSpec(datasets=("DebugVector",), algorithms=("ERM",))
    named = [normalized(replace(sweep, weights=weights)).weights for weights in (None, "none", "pretrained", "w.pth")]
    assert named == [None, "none", "pretrained", str(tmp_path / "w.pth")]
