"""More steps for a run that is finished, or was stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunSpec
from sandmask.training import Progress, RunFolder

Specs = Callable[..., RunSpec]
FILES = ("records.jsonl", "model.safetensors")
AVERAGED = ("model-ema.safetensors", "model-sma.safetensors")


@pytest.mark.parametrize(("steps", "more"), [(12, 19), (11, 16), (1, 12), (12, 13)])
def test_a_finished_run_with_more_steps_is_the_longer_run_to_the_bit(
    steps: int, more: int, tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    options: dict[str, Any] = {"hparams": {"tau": 0.5, "dropout": 0.5}, "averages": ("sma", "ema")}
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    whole.train(spec_of("ANDMask", steps=more, **options), dataset, device)
    parts.train(spec_of("ANDMask", steps=steps, **options), dataset, device, keep_checkpoint=True)
    parts.train(spec_of("ANDMask", steps=more, **options), dataset, device)
    for file in (*FILES, *AVERAGED):
        assert (whole.path / file).read_bytes() == (parts.path / file).read_bytes()
    assert sorted(path.name for path in parts.path.iterdir()) == sorted((*FILES, *AVERAGED))


def test_so_is_one_that_was_stopped(tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    def stop(progress: Progress) -> None:
        if progress.done == 8:
            raise KeyboardInterrupt

    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    whole.train(spec_of(steps=17), dataset, device)
    with pytest.raises(KeyboardInterrupt):
        parts.train(spec_of(steps=12), dataset, device, on_progress=stop)
    parts.train(spec_of(steps=17), dataset, device)
    for file in FILES:
        assert (whole.path / file).read_bytes() == (parts.path / file).read_bytes()


def test_so_is_one_that_was_killed_before_its_first_checkpoint(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(steps=12), dataset, device)
    (tmp_path / "model.safetensors").unlink()
    assert folder.train(spec_of(steps=17), dataset, device).steps.tolist() == [0, 5, 10, 15, 16]


def test_a_kill_after_the_checkpoint_is_longer_loses_nothing(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(steps=12), dataset, device, keep_checkpoint=True)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.train(spec_of(steps=17), dataset, device)
    assert folder.train(spec_of(steps=17), dataset, device).steps.tolist() == [0, 5, 10, 15, 16]


def test_without_its_checkpoint_a_finished_run_says_what_is_needed(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(steps=12), dataset, device)
    with pytest.raises(SandmaskError, match=r"finished after 12 steps, and its checkpoint was not kept.*--keep-checkp"):
        folder.train(spec_of(steps=17), dataset, device)
    assert folder.finished(spec_of(steps=12))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hparams": {"lr_final": 0.1}}, r"learning-rate schedule \(lr_final=0\.1\) depends on the number of steps"),
        ({"averages": ("swad",)}, "average swad depends on the number of steps"),
    ],
)
def test_what_depends_on_the_number_of_steps_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(steps=12, **options), dataset, device, keep_checkpoint=True)
    with pytest.raises(SandmaskError, match=reason):
        folder.train(spec_of(steps=17, **options), dataset, device)


def test_a_run_that_trains_in_another_process_is_left_alone(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(), dataset, device, keep_checkpoint=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with RecordWriter(tmp_path / "records.jsonl"), pytest.raises(SandmaskError, match="another process"):
        folder.train(spec_of(steps=17), dataset, device)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kept_checkpoint_stays_when_the_command_is_repeated(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    folder = RunFolder(tmp_path)
    folder.train(spec_of(), dataset, device, keep_checkpoint=True)
    folder.train(spec_of(), dataset, device)
    assert (tmp_path / "checkpoint.safetensors").exists()
