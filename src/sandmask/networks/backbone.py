"""Any timm backbone by name, as a featurizer with frozen batch-norm."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sandmask.functional.dropout import Dropout
from sandmask.networks._base import Featurizer
from sandmask.networks._timm import create, feature_size
from sandmask.networks.weights import fit_weights

# A model from this size on is laid out for one run that fills the machine, a smaller one for stacks of runs.
LARGE = 1_000_000


class Backbone(Featurizer):
    """A timm model without its last layer: pooled features; dropout before the classifier (site 0).

    It computes as in evaluation, always: batch-norm uses its running statistics, which are constants (its
    scale and shift are trained), so that the examples of a batch, and with them the environments, do not see
    each other. The model's own stochastic depth and dropout are off: `drop` is the one source of noise.

    A large model has its convolutions in channels-last format, which suits tensor cores, and fused attention.
    Both are slow under `torch.func.vmap`, where they work at all; a small model goes without, and stacks.

    `weights` holds a state dict (see `load_weights`) to start from; None leaves timm's random initialization.
    `source` is what messages call it.
    """

    def __init__(
        self,
        name: str,
        input_shape: tuple[int, ...],
        weights: Mapping[str, Tensor] | None = None,
        source: str = "the weights",
    ) -> None:
        super().__init__()
        self.model = create(name, input_shape)
        if weights is not None:
            self.model.load_state_dict(fit_weights(weights, self.model, name, source), strict=False)
        if sum(p.numel() for p in self.model.parameters()) >= LARGE:
            self.memory_format = torch.channels_last
        else:
            _unfuse_attention(self.model)
        self.n_features = feature_size(copy.deepcopy(self.model).to("meta").eval(), name, input_shape)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Training mode is for what contains this module; the model itself stays in evaluation mode."""
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """The features."""
        features: Tensor = self.model(self._laid_out(x))
        return features if drop is None else drop(features, 0)

    def stages(self, x: Tensor, drop: Dropout | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The features, and the maps after the stem and after each block, for models that timm can take apart."""
        model: Any = self.model
        if not hasattr(model, "forward_intermediates"):
            return super().stages(x, drop)
        last, stages = model.forward_intermediates(self._laid_out(x))
        features: Tensor = model.forward_head(last, pre_logits=True)
        return features if drop is None else drop(features, 0), tuple(stages)

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.memory_format != torch.channels_last:
            return x
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # vmap has no contiguous(memory_format)


def _unfuse_attention(model: nn.Module) -> None:
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            vars(part)["fused_attn"] = False
