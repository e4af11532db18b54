"""Evaluation of fewer training examples: the others are evaluated as before, and training does not change."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import sandmask
from sandmask.algorithms import State
from sandmask.datasets import DATASETS, Dataset, TensorDataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.records import MEASURES, RunRecord, RunSpec, class_counts
from sandmask.sweeps import SweepSpec, refused_changes
from sandmask.sweeps._cost import work_of
from sandmask.sweeps._spec import read_sweep, write_sweep
from sandmask.training import Progress, RunFolder, Stack, split_environment, train_stack

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]
LIMIT = 7


def mixed(spec_of: Specs, algorithm: str = "ERM") -> list[RunSpec]:
    """Runs that hold out different environments in two trials."""
    held_out = [(0, 0), (1, 0), (2, 1), (0, 1), (0, 0)]
    return [spec_of(algorithm, (env,), trial_seed=trial, seed=7 * n) for n, (env, trial) in enumerate(held_out)]


def sample(members: Tensor, count: int) -> list[int]:
    return [int(members[n * len(members) // count]) for n in range(count)]


def trained(stack: Stack) -> State:
    state = stack.init()
    for batch in stack.feed(0):
        state, _ = stack.step(state, batch)
    return state


@pytest.mark.parametrize("metrics", [(), tuple(MEASURES)], ids=["accuracy", "metrics"])
@pytest.mark.parametrize("algorithm", ["ERM", "SANDMask"])
def test_a_sample_of_each_training_environment_is_evaluated(
    algorithm: str, metrics: tuple[str, ...], dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    stack = Stack(mixed(spec_of, algorithm), dataset, device, metrics=metrics, train_eval_limit=LIMIT)
    state = trained(stack)
    found = stack.accuracies(state)
    for k, spec in enumerate(stack.specs):
        params = stack.algorithm.network.unflatten(state["params"][k])
        for env in range(len(dataset.environments)):
            inside, outside = split_environment(dataset, env, spec.trial_seed)
            if env not in spec.test_envs:
                inside = torch.tensor(sample(inside, LIMIT))
            for split, (accuracy, sizes) in enumerate(
                zip((found.inside, found.outside), stack.evaluator.sizes(k), strict=True)
            ):
                members = (inside, outside)[split]
                right = stack.algorithm.network.logits(params, dataset.inputs(members)).argmax(1)
                assert sizes[env] == len(members)
                assert accuracy[k, env] == (right == dataset.labels[members]).double().mean().item()


@pytest.mark.parametrize("algorithm", ["ERM", "ARM"], ids=["alone", "in context"])
def test_runs_of_a_stack_are_evaluated_as_alone(
    algorithm: str, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    specs = mixed(spec_of, algorithm)
    stack = Stack(specs, dataset, device, metrics=tuple(MEASURES), train_eval_limit=LIMIT)
    tally = stack.tally(stack.init())
    for k, spec in enumerate(specs):
        alone = Stack([spec], dataset, device, metrics=tuple(MEASURES), train_eval_limit=LIMIT)
        own = alone.tally(alone.init())
        assert tally.right[k].tolist() == own.right[0].tolist()
        torch.testing.assert_close(tally.loss[k], own.loss[0], rtol=1e-6, atol=1e-6)
        for name, values in own.measured.items():
            torch.testing.assert_close(tally.measured[name][k], values[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["ERM", "ARM"], ids=["alone", "in context"])
def test_a_limit_beyond_the_splits_changes_nothing(
    algorithm: str, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    whole, limited = (
        Stack(mixed(spec_of, algorithm), dataset, device, train_eval_limit=limit) for limit in (None, 10**6)
    )
    state = whole.init()
    assert whole.tally(state).right.tolist() == limited.tally(state).right.tolist()
    assert whole.evaluator.sizes(0) == limited.evaluator.sizes(0)


def test_training_and_the_other_accuracies_stay(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    def records(name: str, limit: int | None) -> list[RunRecord]:
        return train_stack(
            mixed(spec_of), dataset, device, tmp_path / name, metrics=["per-class"], train_eval_limit=limit
        )

    for whole, limited in zip(records("whole", None), records("limited", LIMIT), strict=True):
        np.testing.assert_array_equal(whole.metrics["loss"], limited.metrics["loss"])
        np.testing.assert_allclose(whole.metrics["validation_loss"], limited.metrics["validation_loss"], rtol=1e-6)
        np.testing.assert_array_equal(whole.accuracy_out, limited.accuracy_out)
        held_out = list(whole.spec.test_envs)
        np.testing.assert_array_equal(whole.accuracy_in[:, held_out], limited.accuracy_in[:, held_out])
        counted = class_counts(limited)
        assert counted is not None
        assert limited.sizes is not None
        assert counted[-1, ..., 1].sum(-1).tolist() == list(map(list, limited.sizes))


def test_every_run_predicts_only_what_it_needs(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    stack = Stack(mixed(spec_of), dataset, device, train_eval_limit=LIMIT)
    predicted = 0

    def predict(state: State, x: Tensor) -> Tensor:
        nonlocal predicted
        predicted += len(state["params"]) * len(x)
        return torch.zeros(len(state["params"]), len(x), 2)

    stack.evaluator.alone(predict, stack.init())
    assert predicted == sum(sum(map(sum, stack.evaluator.sizes(k))) for k in range(stack.n_runs))
    assert predicted < stack.n_runs * len(dataset.labels)


def test_progress_counts_the_examples_that_are_evaluated(
    dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    stack = Stack([spec_of()], dataset, device, train_eval_limit=LIMIT)
    told: list[tuple[int, int]] = []
    stack.evaluator.on_batch = lambda done, total: told.append((done, total))
    stack.tally(stack.init())
    assert told[-1] == (sum(map(sum, stack.evaluator.sizes(0))),) * 2


def test_a_split_that_is_sorted_by_class_is_sampled_fairly(spec_of: Specs, device: torch.device) -> None:
    labels = torch.tensor([0] * 60 + [1] * 60)
    parts = [(torch.randn(120, 2), labels) for _ in range(3)]
    data = TensorDataset("DebugVector", ("a", "b", "c"), ("0", "1"), parts)
    data.splits = (torch.arange(360) % 6 == 0).long()
    stack = Stack([spec_of()], data, device, metrics=["per-class"], train_eval_limit=10)
    counts = stack.tally(stack.init()).measured["per-class"].view(6, 2, 2)
    assert counts[1:3, :, 1].tolist() == [[5, 5]] * 2


def test_no_training_examples_are_refused(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    with pytest.raises(SandmaskError, match=r"train_eval_limit should be at least 1\. Found 0"):
        Stack([spec_of()], dataset, device, train_eval_limit=0)
    with pytest.raises(SandmaskError, match=r"train_eval_limit should be at least 1\. Found -2"):
        SweepSpec(("Spirals",), ("ERM",), train_eval_limit=-2)


def test_an_interrupted_run_goes_on_with_the_same_limit(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, interrupt_at: Interrupts
) -> None:
    folder, spec = RunFolder(tmp_path / "run"), spec_of()
    with pytest.raises(KeyboardInterrupt):
        folder.train(spec, dataset, device, train_eval_limit=LIMIT, on_progress=interrupt_at(6))
    for other in (None, LIMIT + 1):
        with pytest.raises(SandmaskError, match="--train-eval-limit"):
            folder.train(spec, dataset, device, train_eval_limit=other)
    record = folder.train(spec, dataset, device, train_eval_limit=LIMIT)
    once = RunFolder(tmp_path / "once").train(spec, dataset, device, train_eval_limit=LIMIT)
    np.testing.assert_array_equal(record.accuracy_in, once.accuracy_in)
    assert record.sizes is not None
    assert record.sizes[0][1:] == (LIMIT, LIMIT)


def test_a_stack_goes_on_with_the_same_limit(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, interrupt_at: Interrupts
) -> None:
    file = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train_stack([spec_of()], dataset, device, file, train_eval_limit=LIMIT, on_progress=interrupt_at(6))
    with pytest.raises(SandmaskError, match=f"was started with --train-eval-limit {LIMIT}"):
        train_stack([spec_of()], dataset, device, file)


def test_a_sweep_file_keeps_the_limit(tmp_path: Path) -> None:
    sweep = SweepSpec(("Spirals",), ("ERM",), train_eval_limit=LIMIT)
    write_sweep(sweep, tmp_path / "sweep.toml")
    assert SweepSpec(**read_sweep(tmp_path / "sweep.toml")) == sweep
    assert refused_changes(sweep, replace(sweep, train_eval_limit=None)) == [
        f"train_eval_limit is {LIMIT} there, but the default was requested"
    ]


def test_less_work_is_planned(spec_of: Specs) -> None:
    data = load_dataset(DATASETS["DebugVector"])
    whole, limited = (work_of(spec_of(), data, None, limit) for limit in (None, LIMIT))
    left_out = sum(len(split_environment(data, env, 0)[0]) - LIMIT for env in (1, 2))
    evaluations = 4  # at steps 0, 5, 10 and 11
    each = whole.step / (2 * 8)
    assert whole.total - limited.total == pytest.approx(evaluations * left_out * each / 3, rel=0.02)


def test_tables_of_a_sweep_stay(tmp_path: Path) -> None:
    tables, sizes = [], []
    for name, limit in (("whole", None), ("limited", LIMIT)):
        swept = sandmask.sweep(
            tmp_path / name,
            "DebugVector",
            "ERM,ANDMask",
            n_hparams=2,
            n_trials=2,
            steps=12,
            checkpoint_every=5,
            hparams={"mlp_width": 8, "mlp_depth": 3, "batch_size": 8},
            train_eval_limit=limit,
            device="cpu",
            workers=1,
            calibrate=False,
            progress=False,
        )
        sizes.append({run.sizes[0] for run in swept.records() if run.sizes and run.spec.test_envs == (0,)})
        tables.append(swept.report().frame())
    assert sizes == [{(52, 52, 52)}, {(52, LIMIT, LIMIT)}]
    assert tables[0].equals(tables[1])
