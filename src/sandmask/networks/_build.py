"""From the name of a network to a function that builds its featurizer; the networks that lists suggest."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sandmask.errors import SandmaskError
from sandmask.networks._base import Featurizer
from sandmask.networks._registry import NETWORKS, NetworkEntry
from sandmask.networks.own import NetworkReport, OwnNetwork, inspect_module
from sandmask.networks.small import MLP, MNISTConvNet

PRETRAINED, NO_WEIGHTS = "pretrained", "none"

TRANSFORMER_SIZES = ("last_blocks", "attention_only")
FREEZE = "freeze_bn"

Build = Callable[..., Featurizer]


def build_featurizer(
    network: str, input_shape: tuple[int, ...], sizes: Mapping[str, int], weights: str | Path | None = None
) -> Build:
    """Return a function that builds the featurizer of a network.

    The function takes `extra_channels`, for methods that append channels (or elements) to the inputs.

    :param network: a registered name, such as `mlp`, or the name of a timm model.
    :param input_shape: shape of one example.
    :param sizes: `mlp_width` and `mlp_depth`, for `mlp` and networks that ask for them.
    :param weights: "pretrained" (the default for timm models), "none", or the path of a file, which is read once.
    """
    network = network.strip()
    if network not in NETWORKS:
        return _timm_build(network.lower(), input_shape, sizes, weights)
    entry = NETWORKS[network]
    if asked := [name for name in TRANSFORMER_SIZES if sizes.get(name)]:
        raise SandmaskError(f"The hyperparameter {asked[0]} is for vision transformers. Found the network {network}.")
    if not sizes.get(FREEZE, 1):
        raise SandmaskError(f"freeze_bn=0 is for timm networks with batch-norm. Found the network {network}.")
    if weights is not None and str(weights) not in (PRETRAINED, NO_WEIGHTS):
        raise SandmaskError(
            f"The network {entry.name} starts from random weights and takes no file. Leave out --weights."
        )
    build = _registered_build(entry, input_shape, sizes)
    with torch.random.fork_rng(devices=[]):
        build()  # what does not fit is found out now
    return build


def _widened(input_shape: tuple[int, ...], extra_channels: int) -> tuple[int, ...]:
    return (input_shape[0] + extra_channels, *input_shape[1:])


def _registered_build(entry: NetworkEntry, input_shape: tuple[int, ...], sizes: Mapping[str, int]) -> Build:
    if entry.build is None:
        raise SandmaskError(f"The network {entry.name!r} has no function that builds it: NetworkEntry(build=...).")
    make, given = entry.build, _arguments(entry, sizes)

    @cache
    def report(shape: tuple[int, ...]) -> NetworkReport:
        with torch.random.fork_rng(devices=[]):
            return inspect_module(entry.name, make(shape, **given), shape, stacks=entry.stacks)

    def build(extra_channels: int = 0) -> Featurizer:
        shape = _widened(input_shape, extra_channels)
        module = make(shape, **given)
        return module if isinstance(module, Featurizer) else OwnNetwork(module, report(shape))

    return build


def _arguments(entry: NetworkEntry, sizes: Mapping[str, int]) -> dict[str, int]:
    """The hyperparameters that an entry's function asks for by name."""
    assert entry.build is not None
    asked = list(inspect.signature(entry.build).parameters.values())[1:]
    missing = [each.name for each in asked if each.default is each.empty and each.name not in sizes]
    if missing:
        raise SandmaskError(
            f"The network {entry.name} needs {' and '.join(missing)}. Set them with --hparam NAME=VALUE."
        )
    return {each.name: sizes[each.name] for each in asked if each.name in sizes}


def _mlp(input_shape: tuple[int, ...], mlp_width: int, mlp_depth: int) -> Featurizer:
    return MLP(math.prod(input_shape), mlp_width, mlp_depth)


def _convnet(input_shape: tuple[int, ...]) -> Featurizer:
    if len(input_shape) != 3:
        raise SandmaskError(
            "The network mnist-convnet takes images, [channels, height, width]; the inputs here have the "
            f"shape {list(input_shape)}. Choose the network mlp."
        )
    return MNISTConvNet(input_shape[0])


for _entry in (
    NetworkEntry("mlp", "multi-layer perceptron; width and depth are hyperparameters (default for Spirals)", _mlp),
    NetworkEntry("mnist-convnet", "four convolutions, 128 features (default for the MNIST sets)", _convnet),
):
    NETWORKS.register(_entry)


def _timm_build(name: str, input_shape: tuple[int, ...], sizes: Mapping[str, int], weights: str | Path | None) -> Build:
    from sandmask.networks._timm import check_input_shape, resolve
    from sandmask.networks.backbone import Backbone

    name = resolve(name)
    check_input_shape(name, input_shape)
    options: dict[str, Any] = {option: sizes.get(option, 0) for option in TRANSFORMER_SIZES}
    options[FREEZE] = bool(sizes.get(FREEZE, 1))
    if weights is not None and str(weights).lower() == NO_WEIGHTS:
        return lambda extra_channels=0: Backbone(name, _widened(input_shape, extra_channels), **options)
    state, source = _read(name, input_shape, weights)

    @cache
    def template(extra_channels: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):  # all its numbers come from the file
            return Backbone(name, _widened(input_shape, extra_channels), state, source, **options)

    template(0)  # a file that does not fit is found out now
    return lambda extra_channels=0: copy.deepcopy(template(extra_channels))


def _read(name: str, input_shape: tuple[int, ...], weights: str | Path | None) -> tuple[dict[str, torch.Tensor], str]:
    """A state dict, and what messages call it."""
    from sandmask.networks._pretrained import pretrained_weights
    from sandmask.networks.weights import load_weights

    if weights is None or str(weights).lower() == PRETRAINED:
        return pretrained_weights(name, input_shape), f"timm's {name}"
    return load_weights(weights), str(weights)


_FROM_TIMM = (
    NetworkEntry("resnet50.tv_in1k", "ResNet-50, torchvision's first ImageNet weights (default for image sets)"),
    NetworkEntry("resnet18.tv_in1k", "ResNet-18, torchvision's ImageNet weights; a quarter of the work"),
    NetworkEntry("tf_efficientnet_lite0.in1k", "EfficientNet-Lite0, ImageNet; small and fast, 0.5 normalization"),
    NetworkEntry("efficientnet_b0.ra_in1k", "EfficientNet-B0, ImageNet"),
    NetworkEntry("convnext_tiny.fb_in1k", "ConvNeXt-T, ImageNet; no batch-norm to freeze"),
    NetworkEntry("vit_small_patch16_224.augreg_in21k", "ViT-S/16, ImageNet-21k"),
    NetworkEntry("vit_base_patch16_clip_224.openai", "ViT-B/16, CLIP's image tower"),
    NetworkEntry("vit_small_patch14_dinov2.lvd142m", "ViT-S/14, DINOv2, self-supervised"),
    NetworkEntry("vit_base_patch14_dinov2.lvd142m", "ViT-B/14, DINOv2, self-supervised"),
)


def suggested_networks() -> tuple[NetworkEntry, ...]:
    """A short list; every other timm model works too, by its name."""
    return (*NETWORKS.values(), *_FROM_TIMM)
