"""Models that a sweep keeps, against the accuracies that were recorded of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec, split_averages
from sandmask.selection import RULES
from sandmask.training import Progress, RunFolder, TrainedRun, kept_models, load_run, split_environment, train_stack
from sandmask.training.keeping import find_model

Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]
NAME = "s.models.safetensors"


@pytest.fixture
def specs(spec_of: Specs) -> list[RunSpec]:
    """The rates are so large that the last evaluation is not the best one."""
    more = {"averages": ["sma", "swad"], "steps": 26, "hparams": {"lr": 0.3, "sma_start": 2, "lr_patience": 3}}
    return [spec_of("ERM", (k % 3,), seed=k, trial_seed=k, **more) for k in range(3)]


def accuracies(model: TrainedRun, dataset: Dataset) -> list[float]:
    found = []
    for env in range(len(dataset.environments)):
        numbers, _ = split_environment(dataset, env, model.spec.trial_seed)
        answers = model.logits(dataset.inputs(numbers)).argmax(-1)
        found.append(float((answers == dataset.labels[numbers]).double().mean()))
    return found


def kinds(run: RunRecord) -> dict[str | None, RunRecord]:
    return {one.spec.options.get("average"): one for one in split_averages([run])}


def test_the_kept_model_is_that_of_the_checkpoint_that_selection_takes(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    runs = train_stack(specs, dataset, device, tmp_path / "c", keep="best", models=tmp_path / NAME)
    taken = set()
    for run in runs:
        for average, record in kinds(run).items():
            choice = RULES["training-domain"].choose(record, ())
            assert choice is not None
            taken.add((average, choice.index))
            model = load_run(tmp_path / NAME, run=run.spec.id, average=average)
            np.testing.assert_allclose(accuracies(model, dataset), record.accuracy_in[choice.index], rtol=0, atol=1e-9)
            found = find_model(tmp_path, record.spec.id, None)  # by the id that reports show
            assert (found.average, found.step) == (average, record.steps[choice.index])
    assert len({index for average, index in taken if average != "swad"}) > 1, "too easy: one checkpoint is always best"


def test_the_last_model_is_that_of_the_last_step(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    runs = train_stack(specs, dataset, device, tmp_path / "c", keep="last", models=tmp_path / NAME)
    for run in runs:
        for average, record in kinds(run).items():
            model = load_run(tmp_path / NAME, run=run.spec.id, average=average)
            np.testing.assert_allclose(accuracies(model, dataset), record.accuracy_in[-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("stop_at", [6, 13, 26])
def test_interrupted_and_resumed_keeps_the_same_file(
    stop_at: int, specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path, interrupt_at: Interrupts
) -> None:
    train_stack(specs, dataset, device, tmp_path / "c", keep="best", models=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_stack(
            specs,
            dataset,
            device,
            tmp_path / "d",
            keep="best",
            models=tmp_path / "parts",
            on_progress=interrupt_at(stop_at),
        )
    assert not (tmp_path / "parts").exists()
    with pytest.raises(SandmaskError, match="other --keep-models"):
        train_stack(specs, dataset, device, tmp_path / "d")
    train_stack(specs, dataset, device, tmp_path / "d", keep="best", models=tmp_path / "parts")
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_run_that_diverges_keeps_what_was_best_before(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    # The rate is still small at the first evaluation, and far too large at the second.
    spec = spec_of("ERM", steps=26, hparams={"lr": 1e38, "weight_decay": 1e30, "lr_warmup": 1.0})
    (run,) = train_stack([spec], dataset, device, tmp_path / "c", keep="best", models=tmp_path / NAME)
    assert run.status == "diverged"
    kept = list(kept_models(tmp_path))
    assert [model.step for model in kept] == ([int(run.steps[0])] if len(run.steps) else [])
    train_stack([spec], dataset, device, tmp_path / "d", keep="last", models=tmp_path / NAME)
    assert list(kept_models(tmp_path)) == []
    with pytest.raises(SandmaskError, match="holds no models"):
        load_run(tmp_path / NAME)


def test_files_that_hold_no_models_say_what_to_do(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    train_stack([spec_of()], dataset, device, tmp_path / "c", keep="last", models=tmp_path / NAME)
    whole, records = (tmp_path / NAME).read_bytes(), NAME.replace(".models.safetensors", ".records.parquet")
    (tmp_path / NAME).write_bytes(whole[:500])
    for read in (load_run, lambda path: list(kept_models(path))):
        with pytest.raises(SandmaskError, match=rf"To train its runs again, also delete {records} in the same folder"):
            read(tmp_path / NAME)
    RunFolder(tmp_path / "run").train(spec_of(), dataset, device)
    (tmp_path / "run" / "model.safetensors").rename(tmp_path / NAME)
    for read in (load_run, lambda path: list(kept_models(path))):
        with pytest.raises(SandmaskError, match="is not a file of a sweep's models"):
            read(tmp_path / NAME)


def test_a_model_has_to_be_named_where_there_are_several(
    specs: list[RunSpec], dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    train_stack(specs, dataset, device, tmp_path / "c", keep="last", models=tmp_path / NAME)
    listed = len(list(kept_models(tmp_path)))
    assert listed == 9  # as `sandmask sweep models` counts them
    either = "Name one with --run ID, or averaged weights with --run ID --average sma or swad; `sandmask sweep models"
    with pytest.raises(SandmaskError, match=rf"holds {listed} models\. {either}"):
        load_run(tmp_path / NAME)
    with pytest.raises(SandmaskError, match=r"holds 3 models of the average 'sma'\. Name one with --run ID; `sandmask"):
        load_run(tmp_path / NAME, average="sma")
    with pytest.raises(SandmaskError, match="no models of run 'xyz'"):
        load_run(tmp_path / NAME, run="xyz")
    with pytest.raises(SandmaskError, match=r"no models of the average 'ema'\. It has these averages: sma, swad"):
        load_run(tmp_path / NAME, average="ema")


def test_runs_of_a_trial_may_start_from_the_same_weights(
    spec_of: Specs, dataset: Dataset, device: torch.device, tmp_path: Path
) -> None:
    from sandmask.training import Stack

    runs = [spec_of(seed=seed, trial_seed=trial, shared_init=True) for seed, trial in ((1, 0), (2, 0), (3, 1))]
    params = Stack(runs, dataset, device).init()["params"]
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[0], params[2])
    assert spec_of().options == {}
    assert spec_of(shared_init=True).id != spec_of().id
