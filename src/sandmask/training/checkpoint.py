"""Trees of tensors on disk: written whole or not at all, read back into the same structure."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._replacing import replacing
from sandmask.errors import SandmaskError


def _word(key: Any) -> str:
    """One step of a path through a tree: the name of a field, the key of a dict or the place in a list."""
    return str(next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)))


def _named_leaves(tree: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {".".join(map(_word, path)): leaf for path, leaf in leaves}


def save_tree(path: Path, tree: Any, metadata: dict[str, Any]) -> None:
    """Write a tree of tensors and JSON metadata; the file appears complete, or the old one stays."""
    tensors = {name: leaf.detach().contiguous().cpu() for name, leaf in _named_leaves(tree).items()}
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(save(tensors, {"sandmask": json.dumps(metadata)}))
        file.flush()
        os.fsync(file.fileno())


def load_metadata(path: Path) -> dict[str, Any]:
    """The JSON metadata of a file that `save_tree` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("sandmask")
    except (OSError, SafetensorError) as error:
        raise SandmaskError(
            f"{path} cannot be read as a checkpoint: {error}. Delete it to start the run anew."
        ) from error
    if text is None:
        raise SandmaskError(f"{path} was not written by sandmask: it has no run description.")
    metadata: dict[str, Any] = json.loads(text)
    return metadata


def load_leaves(path: Path) -> dict[str, Tensor]:
    """The tensors of such a file by name, on the CPU."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


def load_tree(path: Path, like: Any, device: torch.device) -> Any:
    """Read a tree of the structure, shapes and dtypes of `like`."""
    expected = _named_leaves(like)
    with safe_open(path, framework="pt", device=str(device)) as file:
        names = set(file.keys())
        if names != set(expected):
            odd = sorted(names ^ set(expected))[:3]
            raise SandmaskError(
                f"{path} does not fit this run: entries {', '.join(odd)} differ. Was it made by another version?"
            )
        # Copied, since a tensor inside a file starts anywhere, and CPU kernels round by how their memory is aligned.
        leaves = [file.get_tensor(name).clone() for name in expected]
    for (name, want), leaf in zip(expected.items(), leaves, strict=True):
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise SandmaskError(
                f"{path} does not fit this run: {name} is {tuple(leaf.shape)}, expected {tuple(want.shape)}."
            )
    return pytree.tree_unflatten(leaves, pytree.tree_structure(like))
