"""Diagnostics of training: they say what a loop over elements would, and change nothing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, DIAGNOSTICS, diagnostic_names
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec
from sandmask.training import Progress, Stack, split_environment, train_stack

Specs = Callable[..., RunSpec]
MASKED = ["ANDMask", "ANDMask-rescaled", "SANDMask", "SANDMask-released"]
UNRECORDED = ("ADRMX", "ARM", "MTL", "URM")  # do not predict by the network alone
HELD_OUT = {"held_out_loss", "held_out_agreement", "held_out_coherence"}
HPARAMS = {"tau": 0.4, "dropout": 0.1}


def same_but_for_diagnostics(one: RunRecord, other: RunRecord) -> None:
    assert (one.spec.id, one.status) == (other.spec.id, other.status)
    np.testing.assert_array_equal(one.accuracy_in, other.accuracy_in)
    np.testing.assert_array_equal(one.accuracy_out, other.accuracy_out)
    for name, curve in one.metrics.items():
        np.testing.assert_array_equal(curve, other.metrics[name])


@pytest.mark.parametrize(
    ("algorithm", "runs"), [("ERM", 1), ("SANDMask", 1), *((each, 3) for each in ("ERM", "IRM", *MASKED))]
)
def test_no_number_changes_by_a_bit(
    algorithm: str, runs: int, spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    hparams = HPARAMS if algorithm in MASKED else {}
    specs = [spec_of(algorithm, (k % 3,), seed=k, trial_seed=k, hparams=hparams) for k in range(runs)]
    states, records = [], []
    for on in (False, True):
        stack = Stack(specs, dataset, device, diagnostics=on)
        state = stack.init()
        for batch in stack.feed(0):
            state, _ = stack.step(state, batch)
            stack.held_out(state)
        states.append(state)
        records.append(train_stack(specs, dataset, device, tmp_path / str(on), diagnostics=on))
    assert all(torch.equal(a, b) for a, b in zip(*map(pytree.tree_leaves, states), strict=True))
    for plain, diagnosed in zip(*records, strict=True):
        same_but_for_diagnostics(plain, diagnosed)
        extra = diagnosed.metrics.keys() - plain.metrics.keys()
        slots = Stack(specs, dataset, device).algorithm.network.slots
        names = {*diagnostic_names(slots), "held_out_mask_density"} if algorithm in MASKED else set()
        assert extra == HELD_OUT | names
        assert not np.isnan(np.array(list(diagnosed.metrics.values()))).any()


def test_figures_are_those_of_a_loop(spec_of: Specs, dataset: Dataset, device: torch.device) -> None:
    stack = Stack([spec_of("SANDMask", hparams={"tau": 0.3})], dataset, device, diagnostics=True)
    algorithm, state = stack.algorithm, stack.init()
    batch = next(stack.feed(0))
    _, metrics = stack.step(state, batch)
    named = dict(zip(diagnostic_names(algorithm.network.slots), metrics[DIAGNOSTICS][0].tolist(), strict=True))
    leaf = state["params"][0].clone().requires_grad_()
    params = algorithm.network.unflatten(leaf)
    x, y = batch.x[0], batch.y[0]
    gradients = torch.stack(
        [
            torch.autograd.grad(F.cross_entropy(algorithm.network.logits(params, x[e]), y[e]), leaf, retain_graph=True)[
                0
            ]
            for e in range(len(y))
        ]
    )
    mask = algorithm.mask({name: values[0] for name, values in stack.hparams.items()})  # type: ignore[attr-defined]
    begin = 0
    for slot in algorithm.network.slots:
        piece = gradients[:, begin : begin + slot.numel]
        begin += slot.numel
        check_tensor(named, slot.name, piece, mask.weights(piece))
    check_tensor(named, "all", gradients, mask.weights(gradients))


def check_tensor(named: dict[str, float], name: str, gradients: torch.Tensor, weights: torch.Tensor) -> None:
    counts = [0] * 10
    for total in gradients.sign().sum(0).tolist():
        counts[min(abs(int(total)) * 10 // len(gradients), 9)] += 1
    assert [named[f"agreement/{name}/{b}"] for b in range(10)] == pytest.approx([c / weights.numel() for c in counts])
    assert named[f"mask_density/{name}"] == pytest.approx(weights.mean().item(), abs=1e-5)
    assert named[f"dead_fraction/{name}"] == pytest.approx((weights == 0).double().mean().item())


@pytest.mark.parametrize("algorithm", ["ERM", "ANDMask", "SANDMask"])
def test_a_run_is_diagnosed_the_same_in_a_stack(
    algorithm: str, spec_of: Specs, dataset: Dataset, device: torch.device
) -> None:
    hparams = HPARAMS if algorithm in MASKED else {}
    specs = [spec_of(algorithm, (k % 3,), seed=k, trial_seed=k, hparams=hparams) for k in range(4)]

    def figures(stack: Stack) -> dict[str, torch.Tensor]:
        state = stack.init()
        _, metrics = stack.step(state, next(stack.feed(0)))
        return {**metrics, **stack.held_out(state)}

    together = figures(Stack(specs, dataset, device, diagnostics=True))
    for k, spec in enumerate(specs):
        alone = figures(Stack([spec], dataset, device, diagnostics=True))
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            torch.testing.assert_close(together[name][k], value[0], rtol=1e-4, atol=1e-5)


def test_held_out_gradients_are_those_of_the_examples_that_are_not_trained_on(
    spec_of: Specs, dataset: Dataset, device: torch.device
) -> None:
    spec = spec_of("ANDMask", (1,), trial_seed=2, hparams={"tau": 0.4, "dropout": 0.5})
    stack = Stack([spec], dataset, device, diagnostics=True)
    state = stack.init()
    found = {name: value.item() for name, value in stack.held_out(state).items()}
    smallest = min(len(split_environment(dataset, env, 2)[1]) for env in range(len(dataset.environments)))
    gradients, losses = [], []
    for env in (e for e in range(len(dataset.environments)) if e != 1):
        numbers = split_environment(dataset, env, 2)[1][:smallest]
        leaf = state["params"][0].clone().requires_grad_()
        logits = stack.algorithm.network.logits(stack.algorithm.network.unflatten(leaf), dataset.inputs(numbers))
        loss = F.cross_entropy(logits, dataset.labels[numbers])
        gradients.append(torch.autograd.grad(loss, leaf)[0])
        losses.append(loss.item())
    stacked = torch.stack(gradients).double()
    reached = (stacked != 0).any(0)
    assert 0 < reached.sum() < len(reached), "some units are dead"
    assert found["held_out_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    agreement = stacked.sign().mean(0).abs()[reached]
    assert found["held_out_agreement"] == pytest.approx(agreement.mean().item(), rel=1e-4)
    coherence = stacked.mean(0).square().sum() / stacked.square().sum(1).mean()
    assert found["held_out_coherence"] == pytest.approx(coherence.item(), rel=1e-4)
    density = (stacked.sign().mean(0).abs() >= 0.4).double().mean()
    assert found["held_out_mask_density"] == pytest.approx(density.item(), rel=1e-3)


def test_the_documentation_names_the_methods_without_these_diagnostics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    *first, last = UNRECORDED
    assert f"For every method except {', '.join(first)} and {last}, " in page


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_method_trains_with_diagnostics(
    algorithm: str, spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    hparams = {"tau": 0.5} if algorithm in MASKED else {}
    specs = [spec_of(algorithm, (0,), seed=k, steps=2, hparams=hparams) for k in range(2)]
    for record in train_stack(specs, dataset, device, tmp_path / "c", diagnostics=True):
        predicts_otherwise = algorithm in UNRECORDED
        assert record.metrics.keys() >= (set() if predicts_otherwise else HELD_OUT)
        if predicts_otherwise:
            assert not HELD_OUT & record.metrics.keys()


def interrupt(progress: Progress) -> None:
    if progress.done == 8:
        raise KeyboardInterrupt


def test_a_run_goes_on_as_it_began(spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path) -> None:
    specs = [spec_of("SANDMask", seed=k, hparams=HPARAMS) for k in range(2)]
    whole = train_stack(specs, dataset, device, tmp_path / "whole", diagnostics=True)
    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "parts", diagnostics=True, on_progress=interrupt)
    with pytest.raises(SandmaskError, match="started with --diagnostics"):
        train_stack(specs, dataset, device, tmp_path / "parts")
    parts = train_stack(specs, dataset, device, tmp_path / "parts", diagnostics=True)
    for one, other in zip(whole, parts, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        same_but_for_diagnostics(one, other)
