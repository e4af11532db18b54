"""Featurizers, which map inputs to features, and the registry of networks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from sandmask.functional.dense import Dropout
from sandmask.registry import Registry


class Featurizer(nn.Module):
    """Maps inputs `[N, *input_shape]` to features `[N, n_features]`.

    It may return more than `n_features` columns if that width is faster. The additional columns must be zero.
    """

    n_features: int
    memory_format: torch.memory_format = torch.contiguous_format  # of the weights of convolutions
    stacks = True  # whether it is best to compute K runs together, under `vmap`
    why_not_stacked = ""  # the reason if they are not
    embeds = False  # whether inputs are indices, which a lower precision would round

    @property
    def has_kernels(self) -> bool:
        """Whether its layers have GPU kernels for K runs. If so, runs are stacked even if `stacks` is False."""
        return False

    @property
    def last(self) -> nn.Linear | None:
        """The final linear layer, if `hidden` returns its input; otherwise None."""
        return None

    def hidden(self, x: Tensor, drop: Dropout | None = None) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return the input of the last layer."""
        raise TypeError(f"{type(self).__name__} has a last layer, and should define hidden(x, drop)")

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return the features."""
        raise TypeError(f"{type(self).__name__} should define forward(x, drop)")

    def stages(self, x: Tensor, drop: Dropout | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the features, and intermediate results [N, channels, ...]. Here, these are only the features."""
        features: Tensor = self(x, drop)
        return features, (features,)


class EvaluatedModel(Featurizer):
    """A featurizer that runs `model` in evaluation mode, also in training, followed by dropout (site 0).

    Batch-norm uses its running statistics, so that the examples of a batch, and therefore the environments, do not
    influence each other. The model's own dropout is off; `drop` is the only source of noise.
    """

    model: nn.Module

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the modules around the model."""
        super().train(mode)
        self.model.eval()
        return self

    def compute(self, x: Tensor) -> Tensor:
        """Return the features without dropout."""
        features: Tensor = self.model(x)
        return features

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """Return the features."""
        features = self.compute(x)
        return features if drop is None else drop(features, 0)


@dataclass(frozen=True)
class NetworkEntry:
    """A network in the registry. Models of timm are found by their names and need no entry.

    :param name: its name, for `--network`.
    :param summary: what it is, in a few words.
    :param build: builds the module, which maps inputs `[N, *input_shape]` to features `[N, F]`, without a classifier.
        It is called as `build(input_shape)`, or as `build(input_shape, mlp_width, mlp_depth)` if it has these
        parameters.
    :param stacks: whether several runs should be trained together, if this is possible.
    """

    name: str
    summary: str
    build: Callable[..., nn.Module]
    stacks: bool = True


NETWORKS: Registry[NetworkEntry] = Registry("network")
