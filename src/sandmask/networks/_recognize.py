"""Recognize the architecture that a file of weights was made for."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sandmask.networks._timm import import_timm, pretrained_cfg

# Tried in this order when a file's name says nothing.
_COMMON = (
    "resnet50", "resnet18", "resnet34", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
    "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch16_224",
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2",
    "efficientnet_b0", "efficientnet_lite0", "mobilenetv3_large_100", "convnext_tiny", "convnext_base",
    "swin_tiny_patch4_window7_224", "densenet121", "regnety_016",
)  # fmt: skip
_FOLDERS = 4  # folders above a file that may bear its model's name: a hub's cache has its files that deep


@dataclass(frozen=True)
class Recognized:
    """The architectures whose tensors have the names and shapes of a file's; `named` is the one it is called after."""

    fitting: tuple[str, ...]
    named: str | None

    @property
    def advice(self) -> str:
        """Advice, as a sentence."""
        if self.named is None and len(self.fitting) > 1:
            names = ", ".join(map(repr, self.fitting))
            return (
                f"It fits the networks {names}. Their tensors have the same shapes, but they compute differently "
                "(padding, normalization): choose the one that the file was trained as with --network."
            )
        best = self.named or self.fitting[0]
        others = ", ".join(repr(name) for name in self.fitting if name != best)
        same = f" (Tensors of the same shapes, but other padding or normalization: {others}.)" if others else ""
        return f"It looks like weights for {best!r}: choose --network {best}, or another file.{same}"


def recognize(weights: Mapping[str, Tensor], source: str) -> Recognized | None:
    """The architectures that a state dict fits, if they are named by its file or common."""
    named = _named_by(source)
    for candidate in (*named, *_COMMON):
        if import_timm().is_model(candidate) and _fits(weights, candidate):
            fitting = tuple(name for name in _alike(candidate) if name == candidate or _fits(weights, name))
            return Recognized(fitting, candidate if candidate in named else None)
    return None


def called_after_another(weights: Mapping[str, Tensor], source: str, network: str) -> str | None:
    """The architecture that a file is called after, if that is not `network` and the weights fit it, too."""
    own = network.partition(".")[0]
    named = _named_by(source)
    if not named or named[0] == own or named[0] not in _alike(own) or not _fits(weights, named[0]):
        return None
    return named[0]


def _named_by(source: str) -> list[str]:
    """Architectures in a file's description, its name or its folders' names: the best first, the longest name first."""
    models = import_timm().list_models() if Path(source).is_file() else []
    found: dict[str, None] = {}
    for hint in _hints(Path(source)):
        spelled = re.sub(r"[^a-z0-9]+", "_", hint.lower())
        words = f"_{spelled}_"
        # A digit goes on a number, so resnet50 is not in resnet501; letters may follow directly.
        inside = [name for name in models if re.search(rf"_{re.escape(name)}(?![0-9])", words)]
        found.update(dict.fromkeys(sorted(inside, key=len, reverse=True)))
    return list(found)


def _hints(path: Path) -> Iterator[str]:
    with suppress(OSError, ValueError, AttributeError):  # what timm's models on the hub have beside them
        yield str(json.loads((path.parent / "config.json").read_text(encoding="utf-8")).get("architecture", ""))
    if path.suffix == ".safetensors":
        yield from _metadata(path)
    yield path.stem
    yield from (folder.name for folder in list(path.parents)[:_FOLDERS])


def _metadata(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return [str(value) for value in (file.metadata() or {}).values()]
    except (OSError, SafetensorError):
        return []


def _alike(architecture: str) -> list[str]:
    """The architecture, then those whose names end in the same way, such as tf_efficientnet_b0 and efficientnet_b0."""
    rest = architecture.partition("_")[2]
    ends = (architecture, f"_{rest}") if "_" in rest else (architecture,)
    others = [name for name in import_timm().list_models() if f"_{name}".endswith(ends) and name != architecture]
    return [architecture, *others]


def _fits(weights: Mapping[str, Tensor], architecture: str) -> bool:
    try:
        body, last = _tensors(architecture)
    except RuntimeError:  # timm cannot build every architecture on the meta device with every torch
        return False
    return _shapes(weights, last) == body


def _tensors(architecture: str) -> tuple[dict[str, torch.Size], tuple[str, ...]]:
    """Shapes of an architecture's tensors by name, without its last layer's; the prefixes of that one's."""
    classifier = pretrained_cfg(architecture).get("classifier") or ()
    last = tuple(f"{layer}." for layer in ([classifier] if isinstance(classifier, str) else classifier))
    with torch.device("meta"):
        state = import_timm().create_model(architecture).state_dict()
    return _shapes(state, last), last


def _shapes(state: Mapping[str, Tensor], left_out: tuple[str, ...]) -> dict[str, torch.Size]:
    counted = {name: value.shape for name, value in state.items() if not name.endswith("num_batches_tracked")}
    return {name: shape for name, shape in counted.items() if not name.startswith(left_out)}
