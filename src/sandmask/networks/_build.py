"""Find the function that builds the featurizer of a network, by name."""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sandmask.errors import SandmaskError
from sandmask.networks._timm import check_input_shape, pretrained_weights, resolve
from sandmask.networks.backbone import Backbone
from sandmask.networks.featurizer import NETWORKS, Featurizer, NetworkEntry
from sandmask.networks.own import NetworkReport, OwnNetwork, inspect_module
from sandmask.networks.weights import load_weights

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
    :param sizes: hyperparameters that determine the network, such as `mlp_width`, `mlp_depth` and `last_blocks`.
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
    build = partial(_registered, entry, input_shape, _arguments(entry, sizes))
    with torch.random.fork_rng(devices=[]):
        build()  # raises errors here and not later
    return build


def _widened(input_shape: tuple[int, ...], extra_channels: int) -> tuple[int, ...]:
    return (input_shape[0] + extra_channels, *input_shape[1:])


@cache
def _report(entry: NetworkEntry, shape: tuple[int, ...], arguments: tuple[tuple[str, int], ...]) -> NetworkReport:
    with torch.random.fork_rng(devices=[]):
        return inspect_module(entry.name, entry.build(shape, **dict(arguments)), shape, stacks=entry.stacks)


def _registered(
    entry: NetworkEntry, input_shape: tuple[int, ...], arguments: tuple[tuple[str, int], ...], extra_channels: int = 0
) -> Featurizer:
    shape = _widened(input_shape, extra_channels)
    module = entry.build(shape, **dict(arguments))
    return module if isinstance(module, Featurizer) else OwnNetwork(module, _report(entry, shape, arguments))


def _arguments(entry: NetworkEntry, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the hyperparameters that are parameters of the entry's function."""
    parameters = list(inspect.signature(entry.build).parameters.values())[1:]
    asked = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [each.name for each in asked if each.default is each.empty and each.name not in sizes]
    if missing:
        raise SandmaskError(
            f"The network {entry.name} needs {' and '.join(missing)}. Set them with --hparam NAME=VALUE."
        )
    return tuple((each.name, sizes[each.name]) for each in asked if each.name in sizes)


class _Pretrained:
    """Builds networks with pretrained weights, by copying one that has them."""

    def __init__(self, build: Callable[..., Backbone]) -> None:
        self._build, self._templates = build, dict[int, Backbone]()
        self()  # raises an error here if the file does not fit

    def __call__(self, extra_channels: int = 0) -> Backbone:
        if extra_channels not in self._templates:
            with torch.random.fork_rng(devices=[]):  # the weights replace all random parameters
                self._templates[extra_channels] = self._build(extra_channels=extra_channels)
        return copy.deepcopy(self._templates[extra_channels])


def _backbone(
    name: str, input_shape: tuple[int, ...], *weights: Any, extra_channels: int = 0, **options: Any
) -> Backbone:
    return Backbone(name, _widened(input_shape, extra_channels), *weights, **options)


def _timm_build(name: str, input_shape: tuple[int, ...], sizes: Mapping[str, int], weights: str | Path | None) -> Build:
    name = resolve(name)
    check_input_shape(name, input_shape)
    options: dict[str, Any] = {option: sizes.get(option, 0) for option in TRANSFORMER_SIZES}
    options[FREEZE] = bool(sizes.get(FREEZE, 1))
    if weights is not None and str(weights).lower() == NO_WEIGHTS:
        return partial(_backbone, name, input_shape, **options)
    if weights is None or str(weights).lower() == PRETRAINED:
        state, source = pretrained_weights(name, input_shape), f"timm's {name}"
    else:
        state, source = load_weights(weights), str(weights)
    return _Pretrained(partial(_backbone, name, input_shape, state, source, **options))
