"""Learning-rate schedules against torch's, and in stacks."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau, StepLR

from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec
from sandmask.training import Progress, train_stack
from sandmask.training.schedule import lr_factor, plateau_factor, scheduled, start_plateau, step_plateau

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]
STEPS = 40


def factors(**hparams: float) -> list[float]:
    tensors = {name: torch.tensor([value]) for name, value in hparams.items()}
    return [float(lr_factor(tensors, torch.tensor([step]), STEPS)) for step in range(STEPS)]


def of_torch(scheduler: Callable[[torch.optim.Optimizer], LRScheduler]) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, found = scheduler(optimizer), []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_cosine_is_the_one_of_torch(final: float) -> None:
    expected = of_torch(lambda optimizer: CosineAnnealingLR(optimizer, STEPS, eta_min=final))
    assert factors(lr_final=final) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("fraction", "steps"), [(0.75, 30), (0.25, 10), (0.1, 4)])
def test_drops_are_the_ones_of_torch(fraction: float, steps: int) -> None:
    expected = of_torch(lambda optimizer: StepLR(optimizer, steps, gamma=0.1))
    assert factors(lr_drop=0.1, lr_drop_every=fraction) == pytest.approx(expected, rel=1e-5)


def test_a_warm_up_rises_in_equal_steps_to_one() -> None:
    found = factors(lr_warmup=0.25)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10:] == [1.0] * 30


def test_parts_multiply() -> None:
    found = factors(lr_final=0.0, lr_drop=0.5, lr_drop_every=0.5, lr_warmup=0.1)
    parts = zip(factors(lr_final=0.0), factors(lr_drop=0.5, lr_drop_every=0.5), factors(lr_warmup=0.1), strict=True)
    assert found == pytest.approx([math.prod(each) for each in parts])


def test_only_learning_rates_are_scheduled() -> None:
    hparams = {name: torch.ones(2) for name in ("lr", "lr_g", "lr_d", "weight_decay", "meta_lr")}
    hparams["lr_final"] = torch.zeros(2)
    found = scheduled(hparams, torch.tensor([20, 20]), STEPS)
    assert {name for name, value in found.items() if not torch.equal(value, hparams[name])} == {"lr", "lr_g", "lr_d"}


def test_without_a_schedule_nothing_is_computed() -> None:
    hparams = {"lr": torch.ones(1)}
    assert scheduled(hparams, torch.tensor([3]), STEPS) is hparams


def test_runs_with_different_schedules_stack(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    schedules = ({"lr_final": 1.0, "lr_warmup": 0.0}, {"lr_final": 0.0, "lr_warmup": 0.5})
    specs = [spec_of("ERM", seed=1, space="paper", hparams=schedule) for schedule in schedules]
    together = train_stack(specs, dataset, device, tmp_path / "both.safetensors")
    for spec, record in zip(specs, together, strict=True):
        (alone,) = train_stack([spec], dataset, device, tmp_path / f"{spec.id}.safetensors")
        assert record.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
    plain = spec_of("ERM", seed=1, space="paper")
    (constant,) = train_stack([plain], dataset, device, tmp_path / "plain.safetensors")
    assert together[0].metrics["loss"] == pytest.approx(constant.metrics["loss"], rel=1e-5)
    assert abs(together[1].metrics["loss"] - constant.metrics["loss"]).max() > 1e-3


def test_the_plateau_is_the_one_of_torch_until_it_stops() -> None:
    losses = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.0, 1.0, 5.0])
    patience = torch.tensor([1.0, 2.0, 0.0])
    plateau, found = start_plateau(3, torch.device("cpu")), []
    for step, loss in enumerate(losses):
        for _ in range(2):  # as after an interruption: a second look at the same evaluation
            plateau = step_plateau(
                plateau, loss, step, {"lr_patience": patience, "linear_steps": torch.full((3,), 4.0)}
            )
        found.append(plateau_factor(plateau["drops"]))
    for run in (0, 1):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=int(patience[run]))
        for step, loss in enumerate(losses):
            if step >= 4:
                schedule.step(float(loss[run]))
            rate = float(optimizer.param_groups[0]["lr"])
            assert float(found[step][run]) == pytest.approx(rate if rate > 5e-3 else 0.0)
        assert found[-1][run] == 0
    assert found[-1][2] == 1  # without patience, nothing happens


def test_rates_drop_where_the_loss_stays_and_a_resumed_run_is_the_same(
    spec_of: Specs, dataset: Dataset, tmp_path: Path, interrupt_at: Interrupts
) -> None:
    cpu, how = torch.device("cpu"), {"lr_patience": 1, "lr": 0.0}
    specs = [spec_of(seed=seed, steps=21, checkpoint_every=3, averages=["sma"], hparams=how) for seed in (0, 1)]
    whole = train_stack(specs, dataset, cpu, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, cpu, tmp_path / "parts", on_progress=interrupt_at(10))
    parts = train_stack(specs, dataset, cpu, tmp_path / "parts")
    for one, other in zip(whole, parts, strict=True):
        assert one.metrics["lr_drops"].tolist() == other.metrics["lr_drops"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_run_with_the_drops_of_another_is_the_same_run(spec_of: Specs, dataset: Dataset, tmp_path: Path) -> None:
    """To the bit, averaged weights included, also after the third drop, which ends the training."""

    def trained(name: str, hparams: Sequence[dict[str, float]]) -> list[RunRecord]:
        given = [{"lr": 0.3, "sma_start": 5, **own} for own in hparams]
        specs = [
            spec_of(seed=k, steps=61, checkpoint_every=3, averages=["sma"], hparams=h) for k, h in enumerate(given)
        ]
        return train_stack(specs, dataset, torch.device("cpu"), tmp_path / name)

    searched = trained("searched", [{"lr_patience": 1}] * 2)
    drops = [run.steps[1:][np.diff(run.metrics["lr_drops"]) > 0] for run in searched]
    assert drops[0].tolist() != drops[1].tolist()
    assert {len(steps) for steps in drops} == {3}
    assert max(steps[-1] for steps in drops) < 55
    repeated = trained("repeated", [{f"lr_drop_step_{k}": int(step) for k, step in enumerate(own, 1)} for own in drops])
    for one, other in zip(searched, repeated, strict=True):
        assert one.metrics.keys() == {*other.metrics, "lr_drops"}
        for name, values in other.metrics.items():
            np.testing.assert_array_equal(values, one.metrics[name], err_msg=name)
        np.testing.assert_array_equal(other.accuracy_in, one.accuracy_in)
        averaged = other.metrics["average/sma/validation_loss"]
        assert averaged[-1] == averaged[-2] != other.metrics["validation_loss"][-1]  # it does not approach that


@pytest.mark.parametrize(
    ("hparams", "said"),
    [
        ({"full_data": 1}, "lr_patience needs validation examples"),
        ({"lr_drop_step_1": 5}, "cannot be combined with lr_drop_step_1"),
    ],
)
def test_patience_needs_validation_examples_or_the_drops_of_another_run(
    spec_of: Specs, hparams: dict[str, float], said: str
) -> None:
    with pytest.raises(SandmaskError, match=said):
        spec_of(hparams={"lr_patience": 1, **hparams})
