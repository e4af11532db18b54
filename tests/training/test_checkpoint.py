"""Checkpoints: what is read is what was written, and lies in memory as fresh tensors do."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandmask.errors import SandmaskError
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
