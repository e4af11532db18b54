"""Files with trees of tensors, written atomically.

A checkpoint can be converted to a checkpoint of the same run with more steps, or of some of the runs of a stack.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
from sandmask.records import RunSpec, averages_of
from sandmask.records._archive import ARCHIVE_SUFFIX
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.schedule import PATIENCE

MODELS_SUFFIX = ".models.safetensors"  # files of the models that a sweep keeps; other files belong to a run or a stack
_CHECKSUM = "crc32"
# The values with which the hyperparameters of learning-rate schedules do not change the rate.
_CONSTANT = {"lr_final": 1.0, "lr_drop": 1.0, "lr_warmup": 0.0}


def save_tree(path: Path, tree: Any, metadata: dict[str, Any]) -> None:
    """Write a tree of tensors and JSON metadata. If writing fails, an existing file does not change."""
    tensors = {name: leaf.detach().contiguous().cpu() for name, leaf in _named_leaves(tree).items()}
    # A single entry, because the order of several entries is not fixed, and equal trees should give equal files.
    text = json.dumps({**metadata, _CHECKSUM: _checksum(metadata, tensors)})
    with replacing(path, durable=True) as temporary:
        temporary.write_bytes(save(tensors, {"sandmask": text}))


def load_metadata(path: Path) -> dict[str, Any]:
    """The JSON metadata of a file that `save_tree` wrote. The checksum is not verified."""
    with _opened(path) as file:
        return _description(path, file)[0]


def load_checked(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors by name, on the CPU, of a file from `save_tree`. The checksum is verified."""
    with _opened(path) as file:
        metadata, checksum = _description(path, file)
        # Copied into aligned memory: the rounding of CPU kernels depends on the alignment.
        leaves = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is not a dict
    if checksum not in (None, _checksum(metadata, leaves)):
        raise damaged(path)
    return metadata, leaves


def load_tree(path: Path, like: Any, device: torch.device) -> Any:
    """Read a tree of the structure, shapes and dtypes of `like`."""
    return as_tree(path, load_checked(path)[1], like, device)


def as_tree(path: Path, leaves: Mapping[str, Tensor], like: Any, device: torch.device) -> Any:
    """Convert the tensors of a file, by name, to a tree of the structure, shapes and dtypes of `like`."""
    expected = _named_leaves(like)
    if odd := sorted(leaves.keys() ^ expected.keys())[:3]:
        raise SandmaskError(
            f"{path} does not match this run: entries {', '.join(odd)} differ. It may be from another version."
        )
    for name, want in expected.items():
        leaf = leaves[name]
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise SandmaskError(
                f"{path} does not match this run: {name} has the shape {tuple(leaf.shape)}, expected "
                f"{tuple(want.shape)}."
            )
    return pytree.tree_unflatten([leaves[name].to(device) for name in expected], pytree.tree_structure(like))


def extend_checkpoint(path: Path, old: RunSpec, new: RunSpec) -> None:
    """Convert the checkpoint of a run to a checkpoint of the same run with more steps.

    The result is the same as if the run had been started with the new number of steps. If the first steps of the run
    depend on the number of steps, an error is raised.

    :param path: the checkpoint, which is replaced.
    :param old: spec of the run.
    :param new: the same spec with more steps.
    """
    if reason := _depends_on_steps(new):
        raise SandmaskError(
            f"The run in {path.parent} has {old.steps} steps and cannot be extended, because {reason} depends on the "
            "number of steps. Choose another folder with --out."
        )
    if not path.exists():
        raise SandmaskError(
            f"The run in {path.parent} finished after {old.steps} steps and its checkpoint was not kept, so it "
            f"cannot continue to {new.steps} steps. Choose another folder with --out. To extend runs later, train "
            "them with --keep-checkpoint."
        )
    if load_metadata(path).get("runs") == [new.id]:
        return  # an earlier call was killed right after it wrote this file
    metadata, leaves = load_checked(path)
    if metadata["runs"] != [old.id]:
        raise SandmaskError(f"{path} belongs to another run. Choose another folder with --out.")
    kept = -(-old.steps // old.checkpoint_every)  # evaluations that both runs have
    total = len(list(evaluation_steps(new.steps, new.checkpoint_every)))
    for name, leaf in leaves.items():
        if name.startswith("history."):
            fill = 0.0 if name == "history.counts" else torch.nan
            leaves[name] = torch.full((total, *leaf.shape[1:]), fill, dtype=leaf.dtype)
            leaves[name][:kept] = leaf[:kept]
    save_tree(path, leaves, {**metadata, "runs": [new.id]})


def _depends_on_steps(spec: RunSpec) -> str:
    """The reason why the first steps of a run depend on the number of steps; "" if they do not."""
    schedule = [
        f"{name}={spec.hparams[name]:g}" for name, off in _CONSTANT.items() if spec.hparams.get(name, off) != off
    ]
    if schedule:
        return f"its learning-rate schedule ({', '.join(schedule)})"
    if spec.hparams.get(PATIENCE, 0):
        return "the evaluation after the last step, and with it lr_patience,"
    return "its average swad" if "swad" in averages_of(spec.options) else ""


def split_checkpoint(checkpoint: Path, parts: Sequence[tuple[Sequence[RunSpec], Path]]) -> None:
    """Split the checkpoint of a stack into checkpoints of some of its runs.

    :param checkpoint: checkpoint of the stack.
    :param parts: runs and the file to write, for each part.
    """
    metadata, leaves = load_checked(checkpoint)
    for specs, path in parts:
        ids = [spec.id for spec in specs]
        chosen = torch.tensor([metadata["runs"].index(run) for run in ids])
        part = {
            name: leaf.index_select(1 if name.startswith("history.") else 0, chosen) for name, leaf in leaves.items()
        }
        save_tree(path, part, {**metadata, "runs": ids})


class DamagedFileError(SandmaskError):
    """Raised if the content of a file is not what was written. It is not raised if the file cannot be read."""


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise SandmaskError(f"{path} cannot be opened: its path is not valid UTF-8. Rename the folder.") from error
    try:
        path.open("rb").close()  # raises OSError if the file cannot be read, which safetensors would report as damage
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise SandmaskError(f"{path} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        kind = SandmaskError if "os error" in str(error) else DamagedFileError
        raise kind(f"{path} cannot be read: {error}. {_remedy(path)}") from error


def _description(path: Path, file: Any) -> tuple[dict[str, Any], str | None]:
    """The metadata of an open file, and its checksum, which is None in files of an earlier version."""
    text = (file.metadata() or {}).get("sandmask")
    if text is None:
        raise DamagedFileError(f"{path} was not written by sandmask: it has no run description.")
    try:
        metadata: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise damaged(path) from error
    return metadata, metadata.pop(_CHECKSUM, None)


def damaged(path: Path) -> DamagedFileError:
    """The error for a file whose content does not match its checksum."""
    return DamagedFileError(f"{path} is damaged: its checksum does not match. {_remedy(path)}")


def _remedy(path: Path) -> str:
    if path.name.endswith(MODELS_SUFFIX):
        records = path.name.replace(MODELS_SUFFIX, ARCHIVE_SUFFIX)
        return f"Delete it. To train its runs again, also delete {records} in the same folder, and rerun the sweep."
    return "Delete it to start the run over."


def _checksum(metadata: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """CRC32 of metadata and tensors."""
    checksum = zlib.crc32(json.dumps(metadata).encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def _named_leaves(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by path, which consists of names of fields, keys of dicts and indices of lists."""

    def word(key: Any) -> str:
        return str(next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)))

    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {".".join(map(word, path)): leaf for path, leaf in leaves}
