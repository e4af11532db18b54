"""Recognizes the timm architecture of a weights file by its tensors, its name and its folders, for messages."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from sandmask.networks._timm import import_timm, layer_names

# Tried in this order if the name of a file says nothing.
_COMMON = (
    "resnet50", "resnet18", "resnet34", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
    "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch16_224",
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2",
    "efficientnet_b0", "efficientnet_lite0", "mobilenetv3_large_100", "convnext_tiny", "convnext_base",
    "swin_tiny_patch4_window7_224", "densenet121", "regnety_016",
)  # fmt: skip
_FOLDERS = 4  # folders above a file that may have the name of its model: as deep as in the cache of a hub


def advice(weights: Mapping[str, Tensor], network: str, source: str) -> str:
    """Return what to do with weights that do not fit a network: the architectures that they fit, if any is found.

    :param weights: the tensors of the file.
    :param network: the network that they do not fit.
    :param source: path of the file.
    """
    named = _named_by(source)
    found = next((name for name in (*named, *_COMMON) if import_timm().is_model(name) and _fits(weights, name)), None)
    fitting = [name for name in _alike(found) if name == found or _fits(weights, name)] if found else []
    if found is None or network.partition(".")[0] in fitting:
        return "Give a file for this network, or --weights none."
    if found not in named and len(fitting) > 1:
        return (
            f"It fits the networks {', '.join(map(repr, fitting))}. Their tensors have the same shapes, but they "
            "compute differently (padding, normalization): choose the one that the file was trained as with --network."
        )
    others = ", ".join(repr(name) for name in fitting if name != found)
    same = f" (Tensors of the same shapes, but other padding or normalization: {others}.)" if others else ""
    return f"It looks like weights for {found!r}: choose --network {found}, or another file.{same}"


def other_namesake(weights: Mapping[str, Tensor], network: str, source: str) -> str | None:
    """Return the architecture that a file is named after, if it is not `network` and the weights fit it, too.

    :param weights: the tensors of the file.
    :param network: a network that they fit.
    :param source: path of the file.
    """
    own = network.partition(".")[0]
    named = _named_by(source)
    if not named or named[0] == own or named[0] not in _alike(own) or not _fits(weights, named[0]):
        return None
    return named[0]


def _named_by(source: str) -> list[str]:
    """Architectures in the description of a file, its name and the names of its folders; longer names first."""
    models = import_timm().list_models() if Path(source).is_file() else []
    found: dict[str, None] = {}
    for hint in _hints(Path(source)):
        words = "_" + re.sub(r"[^a-z0-9]+", "_", hint.lower()) + "_"
        # resnet50 is not in resnet501, because a digit continues the number; letters may follow.
        inside = [name for name in models if re.search(rf"_{re.escape(name)}(?![0-9])", words)]
        found.update(dict.fromkeys(sorted(inside, key=len, reverse=True)))
    return list(found)


def _hints(path: Path) -> Iterator[str]:
    """Texts that may name the architecture of a file, the most reliable first."""
    with suppress(OSError, ValueError, AttributeError):  # timm's models on the hub have this file
        yield str(json.loads((path.parent / "config.json").read_text(encoding="utf-8")).get("architecture", ""))
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            yield from map(str, (file.metadata() or {}).values())
    yield path.stem
    yield from (folder.name for folder in list(path.parents)[:_FOLDERS])


def _alike(architecture: str) -> list[str]:
    """The architecture, then those with the same end of the name, such as tf_efficientnet_b0 and efficientnet_b0."""
    rest = architecture.partition("_")[2]
    ends = (architecture, f"_{rest}") if "_" in rest else (architecture,)
    others = [name for name in import_timm().list_models() if f"_{name}".endswith(ends) and name != architecture]
    return [architecture, *others]


def _fits(weights: Mapping[str, Tensor], architecture: str) -> bool:
    """Whether the names and shapes of the tensors are those of an architecture, without its last layer."""
    try:
        with torch.device("meta"):
            state = import_timm().create_model(architecture).state_dict()
    except RuntimeError:  # timm cannot build every architecture on the meta device with every torch
        return False
    last = tuple(f"{layer}." for layer in layer_names(architecture, "classifier"))
    return _shapes(weights, last) == _shapes(state, last)


def _shapes(state: Mapping[str, Tensor], left_out: tuple[str, ...]) -> dict[str, torch.Size]:
    return {
        name: value.shape
        for name, value in state.items()
        if not name.startswith(left_out) and not name.endswith("num_batches_tracked")
    }
