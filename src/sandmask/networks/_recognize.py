"""Which architecture a file of weights was made for."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sandmask.networks._timm import import_timm, pretrained_cfg

# Tried in this order when a file's name says nothing; all have distinct tensors.
_COMMON = (
    "resnet50", "resnet18", "resnet34", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
    "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch16_224",
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2",
    "efficientnet_b0", "efficientnet_lite0", "mobilenetv3_large_100", "convnext_tiny", "convnext_base",
    "swin_tiny_patch4_window7_224", "densenet121", "regnety_016",
)  # fmt: skip


def recognize(weights: Mapping[str, Tensor], source: str) -> str | None:
    """The timm architecture whose tensors have these names and shapes, if it is one that comes to mind."""
    for candidate in _candidates(Path(source).stem):
        body, last = _tensors(candidate)
        if _shapes(weights, last) == body:
            return candidate
    return None


def _candidates(stem: str) -> Iterator[str]:
    """Architectures that the file may be called after, the longest name first, then the common ones."""
    spelled = stem.lower().replace("-", "_")
    named = [name for name in import_timm().list_models() if spelled.startswith(name)]
    yield from sorted(named, key=len, reverse=True)
    yield from (name for name in _COMMON if import_timm().is_model(name))


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
