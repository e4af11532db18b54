"""The interface to timm, which is imported only for backbones."""

import difflib
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sandmask.errors import SandmaskError
from sandmask.networks._registry import NETWORKS

_FORWARD_ERRORS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


def import_timm() -> ModuleType:
    """The package, or an error that says how to get it."""
    try:
        import timm
    except ImportError as error:
        raise SandmaskError("Backbones need timm. Install it with: pip install 'sandmask[vision]'") from error
    module: ModuleType = timm
    return module


def resolve(name: str) -> str:
    """The name as timm spells it (`architecture` or `architecture.tag`), or an error with suggestions."""
    timm = import_timm()
    lowered = name.strip().lower()
    architecture, _, tag = lowered.partition(".")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        raise SandmaskError(
            f"Unknown network {name!r}. {_did_you_mean(near)}Choose {', '.join(NETWORKS)} or the name of a "
            "timm model: sandmask list networks --search 'resnet*'. If it is your own, name its file: --plugin FILE"
        )
    tagged = timm.list_models(f"{architecture}.*", include_tags=True) if tag else []
    if tag and lowered not in tagged:
        near = difflib.get_close_matches(lowered, tagged, n=3, cutoff=0.0)
        raise SandmaskError(f"timm has no weights {tag!r} for the network {architecture!r}. {_did_you_mean(near)}")
    return lowered


def _did_you_mean(names: list[str]) -> str:
    return f"Did you mean {' or '.join(repr(name) for name in names)}? " if names else ""


def pretrained_cfg(name: str) -> dict[str, Any]:
    """timm's metadata of a model's weights: source, normalization, first and last layers."""
    cfg = import_timm().get_pretrained_cfg(resolve(name))
    return {} if cfg is None else dict(cfg.to_dict())


def check_input_shape(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise unless the inputs are images."""
    if len(input_shape) != 3:
        raise SandmaskError(
            f"The network {name!r} takes images, [channels, height, width]; the inputs here have the shape "
            f"{list(input_shape)}. Choose the network mlp."
        )


def create(name: str, input_shape: tuple[int, ...], **options: Any) -> nn.Module:
    """A timm model for inputs of this shape, without its last layer; `options` are timm's."""
    name = resolve(name)
    check_input_shape(name, input_shape)
    if pretrained_cfg(name).get("fixed_input_size"):
        options["img_size"] = input_shape[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm's notes to its own developers
        model: nn.Module = import_timm().create_model(name, num_classes=0, in_chans=input_shape[0], **options)
    return model


def feature_size(model: nn.Module, name: str, input_shape: tuple[int, ...]) -> int:
    """The number of features, by a forward pass without numbers; also finds out whether the inputs fit."""
    try:
        with torch.no_grad():
            features = model(torch.empty(2, *input_shape, device="meta"))
    except _FORWARD_ERRORS as error:
        size = " x ".join(map(str, input_shape))
        raise SandmaskError(f"The network {name!r} does not take inputs of {size}: {error}") from error
    if not isinstance(features, torch.Tensor) or features.ndim != 2:
        raise SandmaskError(f"The network {name!r} has no pooled features, one vector per image. Choose another.")
    return features.shape[1]


def normalization(network: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of red, green and blue (0 to 1) that a network's weights expect.

    ImageNet's values for networks without pretrained weights of their own.

    :param network: name of the network.
    """
    cfg = {} if network in NETWORKS else pretrained_cfg(network)
    mean, std = cfg.get("mean", (0.485, 0.456, 0.406)), cfg.get("std", (0.229, 0.224, 0.225))
    return tuple(map(float, mean)), tuple(map(float, std))
