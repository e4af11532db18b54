"""timm's models by name, and their pretrained weights. timm is imported only when it is needed."""

import difflib
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlparse

import torch
from torch import nn

from sandmask._online import answers
from sandmask._text import first_line
from sandmask.errors import SandmaskError
from sandmask.networks.featurizer import NETWORKS

_FORWARD_ERRORS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # timm looks for them in this order
_REMEDIES = "Give a local file with --weights FILE (.safetensors or .pth), or train from scratch with --weights none."


def import_timm() -> ModuleType:
    """Import timm, or raise an error that says how to install it."""
    try:
        return import_module("timm")
    except ImportError as error:
        raise SandmaskError("Backbones need timm. Install it with: pip install 'sandmask[vision]'") from error


def resolve(name: str) -> str:
    """Return the name as timm spells it (`architecture` or `architecture.tag`), or raise an error with suggestions."""
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
    """Return timm's metadata of the weights of a model: source, normalization, first and last layers."""
    cfg = import_timm().get_pretrained_cfg(resolve(name))
    return {} if cfg is None else dict(cfg.to_dict())


def layer_names(name: str, kind: Literal["first_conv", "classifier"]) -> tuple[str, ...]:
    """Return the names of a model's first convolutions or of its last layers."""
    names = pretrained_cfg(name).get(kind)
    return () if not names else (names,) if isinstance(names, str) else tuple(names)


def check_input_shape(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise an error unless the inputs are images."""
    if len(input_shape) != 3:
        raise SandmaskError(
            f"The network {name!r} takes images, [channels, height, width]. Found inputs of shape "
            f"{list(input_shape)}. Choose the network mlp."
        )


def create(name: str, input_shape: tuple[int, ...], **options: Any) -> nn.Module:
    """Create a timm model without its last layer, for inputs of this shape. `options` are passed to timm."""
    name = resolve(name)
    check_input_shape(name, input_shape)
    if pretrained_cfg(name).get("fixed_input_size"):
        options["img_size"] = input_shape[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are for timm's developers
        model: nn.Module = import_timm().create_model(name, num_classes=0, in_chans=input_shape[0], **options)
    return model


def feature_size(model: nn.Module, name: str, input_shape: tuple[int, ...]) -> int:
    """Return the number of features of a model on the meta device. Raise an error if it does not take the inputs."""
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

    For networks without pretrained weights, these are the values of ImageNet.

    :param network: name of the network.
    """
    cfg = {} if network in NETWORKS else pretrained_cfg(network)
    mean, std = cfg.get("mean", (0.485, 0.456, 0.406)), cfg.get("std", (0.229, 0.224, 0.225))
    return tuple(map(float, mean)), tuple(map(float, std))


def pretrained_weights(name: str, input_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the state dict of timm's pretrained model for images of this size, with three input channels.

    If the weights are not in the cache and there is no connection, this raises an error within seconds. timm alone
    would retry for a long time.
    """
    cfg = pretrained_cfg(name)
    host = _source(cfg)
    if host is None:
        raise SandmaskError(f"timm has no pretrained weights for the network {name!r}. {_REMEDIES}")
    if not is_cached(name) and not answers(host):
        raise SandmaskError(
            f"The pretrained weights of {name!r} are not on this machine, and {host} cannot be reached. " + _REMEDIES
        )
    try:
        model = create(name, (3, *input_shape[1:]), pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise SandmaskError(
            f"The pretrained weights of {name!r} could not be loaded: {first_line(error)} {_REMEDIES}"
        ) from error
    return dict(model.state_dict())


def _source(cfg: dict[str, Any]) -> str | None:
    """The address that timm would download from."""
    if cfg.get("hf_hub_id"):
        from huggingface_hub import constants

        return str(constants.ENDPOINT)
    return str(cfg["url"]) if cfg.get("url") else None


def is_cached(name: str) -> bool:
    """Whether the pretrained weights of a model are on this machine."""
    cfg = pretrained_cfg(name)
    if not cfg.get("hf_hub_id"):
        from torch.hub import get_dir

        return (Path(get_dir()) / "checkpoints" / Path(urlparse(cfg["url"]).path).name).is_file()
    from huggingface_hub import try_to_load_from_cache

    repo, _, revision = str(cfg["hf_hub_id"]).partition("@")
    files = (cfg["hf_hub_filename"],) if cfg.get("hf_hub_filename") else _HUB_FILES
    found = (try_to_load_from_cache(repo, file, revision=revision or None) for file in files)
    return any(isinstance(path, str) for path in found)
