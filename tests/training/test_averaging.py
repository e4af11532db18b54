"""Averaged weights against plain loops over the iterates."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import sandmask
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec, average_metrics, split_averages
from sandmask.records._checks import check_record
from sandmask.training import RunFolder, Stack, load_run, split_environment, train_stack
from sandmask.training.averaging import averaged_state, evaluate_swad, parse_averages, start_averages, step_averages
from sandmask.training.checkpoint import load_checked, save_tree

Specs = Callable[..., RunSpec]


def walk(n_steps: int, n_runs: int = 2, seed: int = 0) -> list[Tensor]:
    """Iterates [K, P]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n_runs, 5, generator=generator) for _ in range(n_steps)]


def follow(name: str, iterates: list[Tensor], at_once: int = 1, **hparams: float) -> Tensor:
    averages = start_averages([name], {"params": torch.zeros_like(iterates[0])}, ["params"])
    numbers = {key: torch.full((len(iterates[0]),), value) for key, value in hparams.items()}
    states = [{"params": params, "step": torch.full((len(params),), step)} for step, params in enumerate(iterates, 1)]
    for begin in range(0, len(states), at_once):
        averages = step_averages(averages, states[begin : begin + at_once], numbers)
    found: Tensor = averages[name]["weights"]["params"]
    return found


@pytest.mark.parametrize("n_steps", [1, 3, 4, 5, 20])
def test_sma_is_the_mean_of_the_iterates_after_the_start(n_steps: int) -> None:
    iterates = walk(n_steps)
    expected = torch.stack(iterates[3:]).mean(0) if n_steps > 3 else iterates[-1]
    torch.testing.assert_close(follow("sma", iterates, sma_start=3.0), expected)


def test_ema_weighs_the_past_by_powers_of_its_decay() -> None:
    iterates = walk(60)
    expected = iterates[0]
    for step, params in enumerate(iterates[1:], 2):
        share = max(0.1, 1.0 / step)
        expected = (1 - share) * expected + share * params
    torch.testing.assert_close(follow("ema", iterates, ema_decay=0.9), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sma", "ema"])
def test_iterates_may_be_taken_in_together(name: str) -> None:
    iterates = walk(7)
    assert torch.equal(follow(name, iterates, at_once=3, sma_start=3.0), follow(name, iterates, sma_start=3.0))


def naive_swad(segments: list[Tensor], losses: list[float], ratio: float) -> Tensor:
    """The definition, looking at all losses at once: 3 evaluations to converge, 6 to give up."""
    starts = [k for k in range(len(losses) - 2) if losses[k] <= min(losses[k : k + 3])]
    if not starts:
        return segments[-1]
    start = starts[0]
    threshold = (1 + ratio) * float(np.mean(losses[start : start + 3]))
    end, above = start + 2, 0
    for k in range(start + 3, len(losses)):
        above = above + 1 if losses[k] > threshold else 0
        if above == 6:
            break
        if above == 0:
            end = k
    return torch.stack(segments[start : end + 1]).mean(0)


@pytest.mark.parametrize("seed", range(12))
def test_swad_averages_the_segments_of_its_valley(seed: int) -> None:
    draws = np.random.RandomState(seed)
    n = draws.randint(1, 30)
    falling = 2.0 * np.exp(-np.arange(n) / 3.0)
    losses = falling + draws.uniform(0.2, 1.0, n) * (1 + (np.arange(n) > 12) * (seed % 3))
    segments = walk(n, n_runs=1, seed=seed)
    average = start_averages(["swad"], {"params": torch.zeros(1, 5)}, ["params"])["swad"]
    for k, (segment, loss) in enumerate(zip(segments, losses, strict=True)):
        noise = [0.5, -0.5] if k else [0.0]  # two iterates whose mean is the segment; the first segment has one
        iterates = [{"params": segment + each, "step": torch.tensor([1])} for each in noise]
        average = step_averages({"swad": average}, iterates, {})["swad"]
        average = evaluate_swad(average, torch.tensor([loss], dtype=torch.float32), {"swad_ratio": torch.tensor([0.3])})
    found = averaged_state({}, average)["params"]
    rounded = [float(np.float32(loss)) for loss in losses]
    torch.testing.assert_close(found, naive_swad(segments, rounded, 0.3), rtol=1e-4, atol=1e-5)


def test_an_average_changes_nothing_about_the_run(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    how = {"seed": 3, "hparams": {"sma_start": 4}}
    (plain,) = train_stack([spec_of("ANDMask", **how)], dataset, device, tmp_path / "plain.safetensors")
    kept = spec_of("ANDMask", averages=("swad", "sma", "ema"), **how)
    (run,) = train_stack([kept], dataset, device, tmp_path / "kept.safetensors")
    assert kept.options == {"averages": "sma,ema,swad"}
    np.testing.assert_array_equal(run.accuracy_in, plain.accuracy_in)
    np.testing.assert_array_equal(run.metrics["loss"], plain.metrics["loss"])
    last, sma, ema, swad = split_averages([run])
    assert last.spec == plain.spec
    assert last.metrics.keys() == plain.metrics.keys()
    assert [each.spec.options for each in (sma, ema, swad)] == [{"average": name} for name in ("sma", "ema", "swad")]
    np.testing.assert_array_equal(sma.steps, run.steps)
    np.testing.assert_array_equal(sma.accuracy_in[:1], run.accuracy_in[:1])  # before its start it is the iterate
    assert swad.steps.tolist() == [11]
    assert np.isfinite(swad.metrics["validation_loss"]).all()


@pytest.mark.parametrize("algorithm", ["ERM", "ARM"])
def test_the_average_that_is_evaluated_is_the_mean_of_the_weights(
    algorithm: str, spec_of: Specs, dataset: Dataset, device: torch.device
) -> None:
    spec = spec_of(algorithm, averages=("sma",), hparams={"sma_start": 2})
    stack = Stack([spec], dataset, device)
    state, iterates = stack.init(), []
    for _ in range(6):
        (batch,) = stack.batches(state["step"][0], 1)
        state, _ = stack.step(state, batch)
        iterates.append({entry: state[entry].clone() for entry in stack.algorithm.averaged})
    _, metrics = stack.evaluate(state)
    means = {entry: torch.stack([each[entry] for each in iterates[2:]]).mean(0) for entry in iterates[0]}
    expected = stack.accuracies({**{k: v for k, v in state.items() if k != "averages"}, **means})
    found = dict(zip(average_metrics("sma", 3), metrics["average/sma"][0].tolist(), strict=True))
    assert [found[f"average/sma/in/{e}"] for e in range(3)] == pytest.approx(expected.inside[0].tolist())
    assert [found[f"average/sma/out/{e}"] for e in range(3)] == pytest.approx(expected.outside[0].tolist())


def test_runs_in_a_stack_have_their_own_averages(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    specs = [
        spec_of("ERM", seed=k, averages=("sma", "swad"), hparams={"sma_start": start}) for k, start in ((1, 2), (2, 7))
    ]
    together = train_stack(specs, dataset, device, tmp_path / "both.safetensors")
    for spec, record in zip(specs, together, strict=True):
        (alone,) = train_stack([spec], dataset, device, tmp_path / f"{spec.id}.safetensors")
        for name in average_metrics("sma", 3):
            assert record.metrics[name] == pytest.approx(alone.metrics[name], abs=0.03)


def test_the_validation_loss_is_the_mean_over_training_environments(
    spec_of: Specs, dataset: Dataset, device: torch.device
) -> None:
    stack = Stack([spec_of("ERM", (1,), seed=5)], dataset, device)
    state = stack.init()
    _, metrics = stack.evaluate(state)
    params = stack.algorithm.network.unflatten(state["params"][0])
    losses = []
    for env in (0, 2):
        _, out = split_environment(dataset, env, 0)
        logits = stack.algorithm.network.logits(params, dataset.inputs(out))
        losses.append(torch.nn.functional.cross_entropy(logits, dataset.labels[out]).item())
    assert metrics["validation_loss"].tolist() == pytest.approx([np.mean(losses)], rel=1e-5)


def test_unknown_averages_are_refused() -> None:
    with pytest.raises(SandmaskError, match=r"Unknown average 'smaa'\. Did you mean 'sma'"):
        parse_averages(["smaa"])


def test_a_run_keeps_the_models_of_its_averages(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    spec = spec_of("ERM", averages=("sma", "swad"), hparams={"sma_start": 4})
    record = RunFolder(tmp_path).train(spec, dataset, device)
    own, sma, swad = split_averages([record])
    sizes = [[len(split) for split in split_environment(dataset, env, 0)] for env in range(3)]
    for one in (own, sma, swad):
        assert one.sizes == tuple(zip(*sizes, strict=True))
        check_record(one)  # accuracies of averages are counts over the same sizes
    first = torch.arange(dataset.bounds[0], dataset.bounds[1])
    for average, expected in (("sma", sma), ("swad", swad)):
        trained = load_run(RunFolder(tmp_path).average_path(average))
        right = trained.logits(dataset.inputs(first)).argmax(-1) == dataset.labels[first]
        inside, outside = split_environment(dataset, 0, 0)
        assert right[inside].double().mean().item() == pytest.approx(expected.accuracy_in[-1, 0])
        assert right[outside].double().mean().item() == pytest.approx(expected.accuracy_out[-1, 0])
    assert load_run(tmp_path).spec == spec


def test_a_model_file_says_which_average_it_holds(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.train(spec_of("ERM", averages=("sma", "swad"), hparams={"sma_start": 4}), dataset, device)
    plain, sma = folder.path / "model.safetensors", folder.average_path("sma")
    assert load_run(plain).info.average is None
    assert load_run(sma).info.average == load_run(sma, average="sma").info.average == "sma"
    with pytest.raises(SandmaskError, match=r"model.safetensors holds weights without averaging, not 'sma'.*/run$"):
        load_run(plain, average="sma")
    with pytest.raises(SandmaskError, match="holds the average 'sma', not 'swad'"):
        load_run(sma, average="swad")
    moved = sma.rename(tmp_path / "moved.safetensors")
    assert load_run(moved).info.average == "sma"
    info, tensors = load_checked(moved)
    save_tree(sma, tensors, {name: value for name, value in info.items() if name != "average"})
    assert load_run(sma).info.average == "sma"  # a file of before, by its name
    with pytest.raises(SandmaskError, match=r"Unknown average 'smaa'\. Did you mean 'sma'"):
        load_run(folder.path, average="smaa")
    with pytest.raises(SandmaskError, match=r"kept no average 'ema'\. Train it with --average ema"):
        load_run(folder.path, average="ema")


@pytest.mark.parametrize("steps", [6, 7])
def test_runs_that_are_too_short_for_their_average_are_said(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hparams = {"sma_start": 5, "lr": 0.05}
    run = sandmask.train("DebugVector", "ERM", 0, averages="sma", hparams=hparams, steps=steps, out=tmp_path)
    last, average = (run.record.metrics[f"{name}validation_loss"][-1] for name in ("", "average/sma/"))
    is_last = bool(np.isclose(last, average, rtol=1e-6, atol=0))
    said = "the first 5 steps, so the average of a run of 6 steps is its last weights" in capsys.readouterr().err
    assert is_last == said == (steps == 6)
