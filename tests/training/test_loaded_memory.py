"""Tensors of a checkpoint lie in memory as fresh ones do: a run that goes on rounds as one that never stopped."""

from pathlib import Path

import torch

from sandmask.training.checkpoint import load_tree, save_tree


def test_loaded_tensors_are_aligned_like_fresh_ones(tmp_path: Path) -> None:
    tree = {name: torch.rand(size) for name, size in (("a", 1), ("b", 137_218), ("c", 3), ("d", 999))}
    save_tree(tmp_path / "x.safetensors", tree, {})
    again = load_tree(tmp_path / "x.safetensors", tree, torch.device("cpu"))
    assert all(torch.equal(again[name], tree[name]) for name in tree)
    assert {leaf.data_ptr() % 64 for leaf in again.values()} == {0}
