"""The registry of networks: ours and a user's own. timm's models need no entry: their names are enough."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from sandmask.registry import Registry


@dataclass(frozen=True)
class NetworkEntry:
    """A network as listed.

    `build` makes the module for inputs of a shape: `build(input_shape)`, or `build(input_shape, mlp_width, mlp_depth)`
    if it wants these hyperparameters. The module maps inputs `[N, *input_shape]` to features `[N, F]`; the classifier
    is put on top of it. `stacks` says whether runs of it are worth training together. timm's models have no `build`.
    """

    name: str
    summary: str
    build: Callable[..., nn.Module] | None = None
    stacks: bool = True


NETWORKS: Registry[NetworkEntry] = Registry("network")
