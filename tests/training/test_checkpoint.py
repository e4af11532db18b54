"""Checkpoints: what is read is what was written, and a run that is finished or was stopped can be given more steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.records import RecordWriter, RunSpec
from sandmask.training import Progress, RunFolder
from sandmask.training.checkpoint import load_checked, load_metadata, load_tree, save_tree

CPU = torch.device("cpu")


def test_loaded_tensors_are_aligned_like_fresh_ones(tmp_path: Path) -> None:
    """So that a run that goes on rounds as one that never stopped."""
    tree = {name: torch.rand(size) for name, size in (("a", 1), ("b", 137_218), ("c", 3), ("d", 999))}
    save_tree(tmp_path / "x.safetensors", tree, {})
    again = load_tree(tmp_path / "x.safetensors", tree, CPU)
    assert all(torch.equal(again[name], tree[name]) for name in tree)
    assert {leaf.data_ptr() % 64 for leaf in again.values()} == {0}


def test_every_kind_of_tensor_is_read_as_it_was(tmp_path: Path) -> None:
    tree = {
        "half": torch.randn(3, 5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(7),
        "none": torch.empty(0, 4),
        "turned": torch.randn(4, 3).T,
    }
    save_tree(tmp_path / "x.safetensors", tree, {"step": 3})
    again = load_tree(tmp_path / "x.safetensors", tree, CPU)
    assert all(torch.equal(again[name], tree[name]) for name in tree)
    assert load_metadata(tmp_path / "x.safetensors") == {"step": 3}


@pytest.mark.parametrize("what", ["tensor", "description", "bracket"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.safetensors"
    save_tree(path, {"a": torch.ones(100)}, {"step": 3})
    data = bytearray(path.read_bytes())
    place = {"tensor": len(data) - 17, "description": data.index(b"3, "), "bracket": data.index(b": 3")}[what]
    data[place] ^= 1
    path.write_bytes(data)
    for read in (load_checked, lambda path: load_tree(path, {"a": torch.ones(100)}, CPU)):
        with pytest.raises(SandmaskError, match=r"x\.safetensors is damaged.*Delete it to start the run over"):
            read(path)


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tree(path, {"a": torch.ones(3)}, {})
    save_file(load_file(path), path, {"sandmask": "{}"})
    assert torch.equal(load_checked(path)[1]["a"], torch.ones(3))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandmaskError, match=r"x\.safetensors cannot be read"):
        load_checked(tmp_path / "x.safetensors")


Specs = Callable[..., RunSpec]
Interrupts = Callable[[int], Callable[[Progress], None]]
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


def test_so_is_one_that_was_stopped(
    tmp_path: Path, dataset: Dataset, spec_of: Specs, device: torch.device, interrupt_at: Interrupts
) -> None:
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    whole.train(spec_of(steps=17), dataset, device)
    with pytest.raises(KeyboardInterrupt):
        parts.train(spec_of(steps=12), dataset, device, on_progress=interrupt_at(8))
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
    with pytest.raises(SandmaskError, match=r"finished after 12 steps and its checkpoint was not kept.*--keep-checkp"):
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
