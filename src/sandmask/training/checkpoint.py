"""Trees of tensors on disk: written whole or not at all, read back into the same structure."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._files import replacing
from sandmask.errors import SandmaskError

_CHECKSUM = "crc32"


def tree_word(key: Any) -> str:
    """One step of a path through a tree: the name of a field, the key of a dict or the place in a list."""
    return str(next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)))


def _named_leaves(tree: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {".".join(map(tree_word, path)): leaf for path, leaf in leaves}


def _checksum(metadata: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """CRC32 of metadata and tensors: a disk may flip a bit, and training would go on with a wrong number."""
    checksum = zlib.crc32(json.dumps(metadata).encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def save_tree(path: Path, tree: Any, metadata: dict[str, Any]) -> None:
    """Write a tree of tensors and JSON metadata; the file appears complete, or the old one stays."""
    tensors = {name: leaf.detach().contiguous().cpu() for name, leaf in _named_leaves(tree).items()}
    # One entry: several come in any order, and the same tree is to make the same file.
    text = json.dumps({**metadata, _CHECKSUM: _checksum(metadata, tensors)})
    with replacing(path, durable=True) as temporary:
        temporary.write_bytes(save(tensors, {"sandmask": text}))


class DamagedFileError(SandmaskError):
    """The content of a file is not what was written. A file that could not be read is not damaged by that."""


def _damaged(path: Path) -> SandmaskError:
    return DamagedFileError(f"{path} is damaged: its checksum does not match. Delete it to start the run over.")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        path.open("rb").close()  # too many open files, or no permission: safetensors has the same error for damage
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise SandmaskError(f"{path} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        if "is not valid UTF-8" in str(error):  # which says nothing about the file
            raise SandmaskError(f"{path} cannot be opened: its path is not valid UTF-8. Rename the folder.") from error
        kind = SandmaskError if "os error" in str(error) else DamagedFileError
        raise kind(f"{path} cannot be read: {error}. Delete it to start the run over.") from error


def _description(path: Path, file: Any) -> tuple[dict[str, Any], str | None]:
    """The metadata of an open file, and its checksum: None in files of an earlier version."""
    text = (file.metadata() or {}).get("sandmask")
    if text is None:
        raise DamagedFileError(f"{path} was not written by sandmask: it has no run description.")
    try:
        metadata: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path) from error
    return metadata, metadata.pop(_CHECKSUM, None)


def load_metadata(path: Path) -> dict[str, Any]:
    """The JSON metadata of a file that `save_tree` wrote, unchecked: that would take reading all of it."""
    with _opened(path) as file:
        return _description(path, file)[0]


def load_checked(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of such a file and its tensors by name, on the CPU, if all is as it was written."""
    with _opened(path) as file:
        metadata, checksum = _description(path, file)
        # Copied, since a tensor inside a file starts anywhere, and CPU kernels round by how their memory is aligned.
        leaves = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
    if checksum not in (None, _checksum(metadata, leaves)):
        raise _damaged(path)
    return metadata, leaves


def load_tree(path: Path, like: Any, device: torch.device) -> Any:
    """Read a tree of the structure, shapes and dtypes of `like`."""
    expected, (_, leaves) = _named_leaves(like), load_checked(path)
    if odd := sorted(leaves.keys() ^ expected.keys())[:3]:
        raise SandmaskError(
            f"{path} does not fit this run: entries {', '.join(odd)} differ. Was it made by another version?"
        )
    for name, want in expected.items():
        leaf = leaves[name]
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise SandmaskError(
                f"{path} does not fit this run: {name} is {tuple(leaf.shape)}, expected {tuple(want.shape)}."
            )
    return pytree.tree_unflatten([leaves[name].to(device) for name in expected], pytree.tree_structure(like))
