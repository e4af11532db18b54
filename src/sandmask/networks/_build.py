"""From the name of a network to a function that builds its featurizer; the networks that lists suggest."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sandmask.errors import SandmaskError
from sandmask.networks._base import Featurizer
from sandmask.networks.mlp import MLP
from sandmask.networks.mnist_convnet import MNISTConvNet

PRETRAINED, NO_WEIGHTS = "pretrained", "none"

Build = Callable[..., Featurizer]


def build_featurizer(
    network: str, input_shape: tuple[int, ...], sizes: Mapping[str, int], weights: str | Path | None = None
) -> Build:
    """Return a function that builds the featurizer of a network.

    The function takes `extra_channels`, for methods that append channels (or elements) to the inputs.

    :param network: `mlp`, `mnist-convnet`, or the name of a timm model.
    :param input_shape: shape of one example.
    :param sizes: `mlp_width` and `mlp_depth`, for `mlp`.
    :param weights: "pretrained" (the default for timm models), "none", or the path of a file, which is read once.
    """
    network = network.strip().lower()
    if network not in ("mlp", "mnist-convnet"):
        return _timm_build(network, input_shape, weights)
    if weights is not None and str(weights) not in (PRETRAINED, NO_WEIGHTS):
        raise SandmaskError(f"The network {network} starts from random weights and takes no file. Leave out --weights.")
    return _mlp_build(input_shape, sizes) if network == "mlp" else _convnet_build(input_shape)


def _widened(input_shape: tuple[int, ...], extra_channels: int) -> tuple[int, ...]:
    return (input_shape[0] + extra_channels, *input_shape[1:])


def _mlp_build(input_shape: tuple[int, ...], sizes: Mapping[str, int]) -> Build:
    missing = [name for name in ("mlp_width", "mlp_depth") if name not in sizes]
    if missing:
        raise SandmaskError(f"The network mlp needs {' and '.join(missing)}. Set them with --hparam NAME=VALUE.")

    def build(extra_channels: int = 0) -> Featurizer:
        return MLP(math.prod(_widened(input_shape, extra_channels)), sizes["mlp_width"], sizes["mlp_depth"])

    return build


def _convnet_build(input_shape: tuple[int, ...]) -> Build:
    if len(input_shape) != 3:
        raise SandmaskError(
            "The network mnist-convnet takes images, [channels, height, width]; the inputs here have the "
            f"shape {list(input_shape)}. Choose the network mlp."
        )
    return lambda extra_channels=0: MNISTConvNet(input_shape[0] + extra_channels)


def _timm_build(name: str, input_shape: tuple[int, ...], weights: str | Path | None) -> Build:
    from sandmask.networks._timm import check_input_shape, resolve
    from sandmask.networks.backbone import Backbone

    name = resolve(name)
    check_input_shape(name, input_shape)
    if weights is not None and str(weights).lower() == NO_WEIGHTS:
        return lambda extra_channels=0: Backbone(name, _widened(input_shape, extra_channels))
    state, source = _read(name, input_shape, weights)

    @cache
    def template(extra_channels: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):  # all its numbers come from the file
            return Backbone(name, _widened(input_shape, extra_channels), state, source)

    template(0)  # a file that does not fit is found out now
    return lambda extra_channels=0: copy.deepcopy(template(extra_channels))


def _read(name: str, input_shape: tuple[int, ...], weights: str | Path | None) -> tuple[dict[str, torch.Tensor], str]:
    """A state dict, and what messages call it."""
    from sandmask.networks._pretrained import pretrained_weights
    from sandmask.networks.weights import load_weights

    if weights is None or str(weights).lower() == PRETRAINED:
        return pretrained_weights(name, input_shape), f"timm's {name}"
    return load_weights(weights), str(weights)


@dataclass(frozen=True)
class NetworkEntry:
    """A network as listed."""

    name: str
    summary: str


_SUGGESTED = (
    NetworkEntry("mlp", "multi-layer perceptron; width and depth are hyperparameters (default for Spirals)"),
    NetworkEntry("mnist-convnet", "four convolutions, 128 features (default for the MNIST sets)"),
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
    return _SUGGESTED
