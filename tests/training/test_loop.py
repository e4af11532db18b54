import signal
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sandmask.algorithms.erm import ERM
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunSpec
from sandmask.records.testing import assert_same_runs
from sandmask.training import Progress, RunFolder, split_checkpoint, train_stack
from sandmask.training.checkpoint import load_metadata

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]


def test_records_and_model(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    record = RunFolder(tmp_path / "run").train(spec_of(), dataset, device)
    assert record.status == "done"
    assert record.steps.tolist() == [0, 5, 10, 11]  # every 5, and the last
    assert record.metrics["loss"][-1] < record.metrics["loss"][0]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["model.safetensors", "records.jsonl"]


def test_same_spec_same_bits(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    for name in ("a", "b"):
        RunFolder(tmp_path / name).train(spec_of("SANDMask", hparams={"tau": 0.1}), dataset, device)
    for file in ("records.jsonl", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_interrupted_at_any_step_goes_on_to_the_same_bits(
    stop_at: int, tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, interrupt_at: Interrupts
) -> None:
    spec = spec_of("ANDMask", hparams={"tau": 0.5, "dropout": 0.5})
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    whole.train(spec, dataset, device)
    with pytest.raises(KeyboardInterrupt):
        parts.train(spec, dataset, device, on_progress=interrupt_at(stop_at))
    parts.train(spec, dataset, device)
    for file in ("records.jsonl", "model.safetensors"):
        assert (whole.path / file).read_bytes() == (parts.path / file).read_bytes()


@pytest.mark.parametrize("stop_at", [1, 3, 6, 11])
def test_interrupted_runs_with_averages_go_on_to_the_same_bits(
    stop_at: int, tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    """An evaluation moves SWAD's average on: it must count once, though it is repeated after an interruption."""

    def interrupt(progress: Progress) -> None:
        if progress.done == stop_at and progress.accuracies is not None:
            raise KeyboardInterrupt

    # A learning rate that lets the validation loss rise, without which the average would never start.
    spec = spec_of("ERM", averages=("sma", "ema", "swad"), checkpoint_every=1, hparams={"lr": 0.3})
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    whole.train(spec, dataset, device)
    with pytest.raises(KeyboardInterrupt):
        parts.train(spec, dataset, device, on_progress=interrupt)
    parts.train(spec, dataset, device)
    assert (whole.path / "records.jsonl").read_bytes() == (parts.path / "records.jsonl").read_bytes()


def test_ctrl_c_inside_a_step_waits_for_its_end(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt inside of `vmap` would leave torch in a broken state. A second one does not wait."""
    specs = [spec_of(seed=seed) for seed in (1, 2)]
    step, presses = ERM.step, list[int]()

    def pressed(self: ERM, *args: Any) -> Any:
        for _ in range(presses.pop() if presses else 0):
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    monkeypatch.setattr(ERM, "step", pressed)
    for times in (1, 2):
        presses[:] = [times]
        with pytest.raises(KeyboardInterrupt):
            train_stack(specs, dataset, device, tmp_path / "stack.safetensors")
        assert load_metadata(tmp_path / "stack.safetensors")["done"] == 1
    assert [run.status for run in train_stack(specs, dataset, device, tmp_path / "stack.safetensors")] == ["done"] * 2


def test_old_checkpoint_and_newer_records(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, interrupt_at: Interrupts
) -> None:
    """Killed after records were written and before the checkpoint was: the lines are made again, not doubled."""
    spec = spec_of()
    folder = RunFolder(tmp_path / "run")

    with pytest.raises(KeyboardInterrupt):
        folder.train(spec, dataset, device, on_progress=interrupt_at(2))
    early = (folder.path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        folder.train(spec, dataset, device, on_progress=interrupt_at(9))
    (folder.path / "checkpoint.safetensors").write_bytes(early)
    assert folder.train(spec, dataset, device).steps.tolist() == [0, 5, 10, 11]


def test_a_finished_run_is_not_trained_again(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(), dataset, device)
    folder.train(spec_of(), dataset, device, on_progress=lambda _: pytest.fail("it trained"))


@pytest.mark.parametrize("lr", [1e-2, 1e30], ids=["done", "diverged"])
@pytest.mark.parametrize("kept", [0, 1, -2, -1])
def test_a_finished_run_without_all_of_its_records_is_trained_again(
    kept: int, lr: float, tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder, spec = RunFolder(tmp_path), spec_of(hparams={"lr": lr})
    folder.train(spec, dataset, device)
    records = tmp_path / "records.jsonl"
    whole = records.read_bytes()
    lines = whole.splitlines(keepends=True)
    records.write_bytes(b"".join(lines[:kept]))
    assert not folder.finished(spec)
    folder.train(spec, dataset, device)
    assert records.read_bytes() == whole
    records.unlink()
    folder.train(spec, dataset, device)
    assert records.read_bytes() == whole


def test_a_finished_run_with_a_damaged_model_is_not_called_finished(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    RunFolder(tmp_path).train(spec_of(), dataset, device)
    model = bytearray((tmp_path / "model.safetensors").read_bytes())
    model[-8] ^= 0xFF
    (tmp_path / "model.safetensors").write_bytes(model)
    with pytest.raises(SandmaskError, match=r"model\.safetensors is damaged.*Delete it"):
        RunFolder(tmp_path).train(spec_of(), dataset, device)


def test_a_damaged_model_of_an_average_is_named(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    spec = spec_of(averages=("sma",))
    RunFolder(tmp_path).train(spec, dataset, device)
    (tmp_path / "model-sma.safetensors").write_bytes(b"")
    with pytest.raises(SandmaskError, match=r"model-sma\.safetensors cannot be read.*Delete it"):
        RunFolder(tmp_path).train(spec, dataset, device)


def test_a_sweeps_folder_is_refused(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    (tmp_path / "sweep.toml").touch()
    with pytest.raises(SandmaskError, match="is the folder of a sweep"):
        RunFolder(tmp_path).train(spec_of(), dataset, device)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_another_runs_folder_is_refused(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    RunFolder(tmp_path).train(spec_of(), dataset, device)
    for _ in range(2):
        with pytest.raises(SandmaskError, match="holds another run, ERM on DebugVector: it differs in ") as caught:
            RunFolder(tmp_path).train(spec_of(seed=1, steps=3, hparams={"lr": 0.5}), dataset, device)
        for words in ("steps (12 there, 3 here)", "seed (0 there, 1 here)", "hparams lr (0.01 there, 0.5 here)"):
            assert words in str(caught.value)
        assert "weight_decay" not in str(caught.value)
        (tmp_path / "records.jsonl").unlink(missing_ok=True)  # the model alone is a run as well


@pytest.mark.parametrize("steps", [None, 3])
def test_a_run_is_not_continued_with_other_environments(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, interrupt_at: Interrupts, steps: int | None
) -> None:
    spec = spec_of()
    if steps is None:
        RunFolder(tmp_path).train(spec, dataset, device)
    else:
        with pytest.raises(KeyboardInterrupt):
            RunFolder(tmp_path).train(spec, dataset, device, on_progress=interrupt_at(steps))
    renamed = copy(dataset)
    renamed.environments = ("a", "c", "b")
    with pytest.raises(
        SandmaskError, match=r"environments a, b, c\. The dataset now has a, c, b\. Restore the dataset"
    ):
        RunFolder(tmp_path).train(spec, renamed, device)
    RunFolder(tmp_path).train(spec, dataset, device)


def test_settings_of_torch_are_restored_after_training(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        RunFolder(tmp_path).train(spec_of(), dataset, device)
        train_stack([spec_of()], dataset, device, tmp_path / "stack.safetensors")
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before)


def test_divergence_is_recorded_with_its_step(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    record = RunFolder(tmp_path).train(spec_of(hparams={"lr": 1e30}), dataset, device)
    assert record.status == "diverged"
    assert record.diverged_at is not None
    assert 0 < record.diverged_at < 11
    assert np.all(record.steps < record.diverged_at)


def test_a_diverged_run_does_not_disturb_the_others(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    specs = [spec_of(seed=1), spec_of(seed=2, hparams={"lr": 1e30}), spec_of(seed=3)]
    runs = train_stack(specs, dataset, device, tmp_path / "checkpoint.safetensors")
    assert [run.status for run in runs] == ["done", "diverged", "done"]
    for spec, run in zip(specs, runs, strict=True):
        alone = RunFolder(tmp_path / spec.id).train(spec, dataset, device)
        np.testing.assert_array_equal(alone.accuracy_in, run.accuracy_in)
        assert (alone.status, alone.diverged_at) == (run.status, run.diverged_at)


def test_model_file_names_its_weights(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    RunFolder(tmp_path).train(spec_of(), dataset, device)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["params.featurizer.layers.0.weight"].shape == (16, 8)


def test_a_broken_checkpoint_is_named(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(SandmaskError, match=r"checkpoint\.safetensors cannot be read"):
        RunFolder(tmp_path).train(spec_of(), dataset, device)


@pytest.fixture
def specs(spec_of: Specs) -> list[RunSpec]:
    hparams = {"tau": 0.5, "dropout": 0.1}
    return [spec_of("SANDMask", (k % 3,), seed=k, trial_seed=k, hparams=hparams) for k in range(4)]


@pytest.mark.parametrize("stop_at", [1, 5, 6, 7, 11, 12])
def test_interrupted_and_resumed_gives_the_same_records(
    stop_at: int, specs: list[RunSpec], tmp_path: Path, dataset: Dataset, device: torch.device, interrupt_at: Interrupts
) -> None:
    whole = train_stack(specs, dataset, device, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "parts", on_progress=interrupt_at(stop_at))
    parts = train_stack(specs, dataset, device, tmp_path / "parts")
    assert [run.status for run in whole] == ["done"] * 4
    assert whole[0].steps.tolist() == [0, 5, 10, 11]
    for one, other in zip(whole, parts, strict=True):
        assert_same_runs([one], [other])


def test_a_checkpoint_splits_into_those_of_some_runs(
    specs: list[RunSpec], tmp_path: Path, dataset: Dataset, device: torch.device, interrupt_at: Interrupts
) -> None:
    whole = {run.spec.id: run for run in train_stack(specs, dataset, device, tmp_path / "whole")}
    with pytest.raises(KeyboardInterrupt):
        train_stack(specs, dataset, device, tmp_path / "all", on_progress=interrupt_at(8))
    parts = [([specs[2], specs[0]], tmp_path / "a"), ([specs[1], specs[3]], tmp_path / "b")]
    split_checkpoint(tmp_path / "all", parts)
    done: list[int] = []
    for chosen, path in parts:
        for run in train_stack(chosen, dataset, device, path, on_progress=lambda progress: done.append(progress.done)):
            np.testing.assert_array_equal(run.accuracy_in, whole[run.spec.id].accuracy_in)
    assert min(done) == 9, "work was done again"
