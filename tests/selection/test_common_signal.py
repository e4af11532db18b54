"""The rule that stops where the environments' gradients have nothing in common any more."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sandmask.datasets import DATASETS, load_dataset
from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run
from sandmask.reports import build_report, render
from sandmask.selection import RULES, has_common_signal, select, signal_threshold
from sandmask.training import make_spec, train_stack

RULE = RULES["common-signal"]


def run_with(coherence: Sequence[float], loss: Sequence[float], draw: int = 0, environments: int = 5) -> RunRecord:
    run = made_up_run([[0.5] * environments] * len(coherence), test_envs=[0], hparams_seed=draw)
    curves = {"held_out_coherence": np.array(coherence), "held_out_loss": np.array(loss)}
    return replace(run, metrics={**run.metrics, **curves})


def test_the_threshold_is_where_signal_and_noise_of_the_mean_are_alike() -> None:
    generator = np.random.default_rng(0)
    for environments in (2, 4, 16):
        size = 200_000
        noise = generator.normal(size=(environments, size))
        signal = generator.normal(size=size) / np.sqrt(environments)  # of the power of the mean's noise
        gradients = signal + noise
        coherence = (gradients.mean(0) ** 2).sum() / (gradients**2).sum(1).mean()
        assert coherence == pytest.approx(signal_threshold(environments), rel=0.02)
        alone = (noise.mean(0) ** 2).sum() / (noise**2).sum(1).mean()
        assert alone == pytest.approx(1 / environments, rel=0.02)


def test_the_most_likely_checkpoint_before_the_signal_is_lost() -> None:
    # Four training environments: the threshold is 0.4. The loss goes on falling after the signal is gone.
    run = run_with([0.2, 0.5, 0.6, 0.5, 0.5, 0.1, 0.1, 0.1], [0.7, 0.65, 0.5, 0.55, 0.4, 0.1, 0.01, 0.0])
    assert has_common_signal(run).tolist() == [False, True, True, True, True, False, False, False]
    choice = RULE.choose(run, ())
    assert choice is not None
    assert choice.index == 4
    assert choice.value == pytest.approx((np.exp(-0.4),))


def test_a_single_high_value_is_noise() -> None:
    assert not has_common_signal(run_with([0.1, 0.9, 0.1, 0.1], [1, 1, 1, 1])).any()
    assert has_common_signal(run_with([0.9], [1.0])).all(), "a lone checkpoint is its own neighbour"


def test_between_runs_the_one_that_learned_most_while_they_agreed() -> None:
    memorized = run_with([0.5, 0.5, 0.1, 0.1], [0.69, 0.68, 0.0, 0.0], draw=1)
    invariant = run_with([0.5, 0.6, 0.7, 0.7], [0.69, 0.60, 0.5, 0.3], draw=0)
    nothing = run_with([0.2, 0.2, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1], draw=2)
    chosen = select(RULE, [memorized, invariant, nothing], 0)
    assert chosen is not None
    assert (chosen.run.spec.hparams_seed, chosen.index) == (0, 3)
    assert select(RULE, [nothing], 0) is None


def test_losses_that_are_no_number_are_not_chosen() -> None:
    run = run_with([0.9, 0.9, 0.9], [0.5, float("nan"), float("inf")])
    choice = RULE.choose(run, ())
    assert choice is not None
    assert choice.index == 0


def test_runs_without_diagnostics_are_refused_and_the_report_says_so() -> None:
    plain = made_up_run([[0.5, 0.9, 0.9]], test_envs=[0])
    assert RULE.choose(plain, ()) is None
    assert select(RULE, [plain], 0) is None
    text = render(build_report([plain], ["common-signal"]))
    assert "no run recorded held_out_coherence and held_out_loss" in text
    assert "--diagnostics" in text
    both = [replace(run_with([0.9], [0.5], environments=3), env_names=plain.env_names), replace_draw(plain, 1)]
    mixed = render(build_report(both, ["common-signal"]))
    assert "50.0 (1/2 runs)" in mixed
    assert "without held_out_coherence and held_out_loss" in mixed


def replace_draw(run: RunRecord, draw: int) -> RunRecord:
    return replace(run, spec=replace(run.spec, hparams_seed=draw))


def test_a_cell_whose_runs_all_lack_a_signal_says_so() -> None:
    text = render(build_report([run_with([0.1, 0.1], [0.5, 0.4])], ["common-signal"]))
    assert "0/1 runs" in text
    assert "the rule selects no checkpoint" in text


def test_real_records_can_be_judged(tmp_path: Path) -> None:
    spec = make_spec(
        DATASETS["DebugVector"], "ANDMask", [0], steps=6, checkpoint_every=2, hparams={"tau": 0.5, "batch_size": 8}
    )
    runs = train_stack([spec], load_dataset("DebugVector"), torch.device("cpu"), tmp_path / "c", diagnostics=True)
    assert not RULE.lacks(runs[0])
    assert has_common_signal(runs[0]).shape == runs[0].steps.shape
