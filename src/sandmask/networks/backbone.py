"""Any timm backbone by name, as a featurizer."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sandmask.errors import SandmaskError
from sandmask.functional.dropout import Dropout
from sandmask.networks._base import Featurizer
from sandmask.networks._timm import create, feature_size
from sandmask.networks.batch_norm import unfreeze
from sandmask.networks.weights import fit_weights

# A model from this size on is laid out for one run that fills the machine, a smaller one for stacks of runs.
LARGE = 1_000_000


class Backbone(Featurizer):
    """A timm model without its last layer: pooled features; dropout before the classifier (site 0).

    It computes as in evaluation: batch-norm uses its running statistics, which are constants (its
    scale and shift are trained), so that the examples of a batch, and with them the environments, do not see
    each other. Without `freeze_bn`, training passes use the statistics of the batch: see `batch_norm`.
    The model's own stochastic depth and dropout are off: `drop` is the one source of noise.

    A large model has its convolutions in channels-last format, which suits tensor cores, and fused attention.
    Both are slow under `torch.func.vmap`, where they work at all; a small model goes without, and stacks.

    `last_blocks` is for vision transformers: the features are then the class tokens of so many blocks, from the last
    one back, and the mean patch token of the last, as in linear probes of DINOv2. With `attention_only` only their
    attention layers are trained; all other parameters are constants.

    `weights` holds a state dict (see `load_weights`) to start from; None leaves timm's random initialization.
    `source` is what messages call it.
    """

    def __init__(
        self,
        name: str,
        input_shape: tuple[int, ...],
        weights: Mapping[str, Tensor] | None = None,
        source: str = "the weights",
        *,
        last_blocks: int = 0,
        attention_only: bool = False,
        freeze_bn: bool = True,
    ) -> None:
        super().__init__()
        self.model = create(name, input_shape)
        self._last_blocks = last_blocks
        _check_transformer(self.model, name, last_blocks, attention_only=attention_only)
        if weights is not None:
            self.model.load_state_dict(fit_weights(weights, self.model, name, source), strict=False)
        if sum(p.numel() for p in self.model.parameters()) >= LARGE:
            self.memory_format = torch.channels_last
        else:
            _unfuse_attention(self.model)
        if not freeze_bn:
            unfreeze(self.model, name)
            self.stacks = False
        if attention_only:
            for part, parameter in self.model.named_parameters():
                parameter.requires_grad = ".attn." in part
        width = feature_size(copy.deepcopy(self.model).to("meta").eval(), name, input_shape)
        self.n_features = width * (1 + last_blocks) if last_blocks else width
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Training mode is for what contains this module; the model itself stays in evaluation mode."""
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, x: Tensor, drop: Dropout | None = None) -> Tensor:
        """The features."""
        x = self._laid_out(x)
        features: Tensor = self._tokens(x) if self._last_blocks else self.model(x)
        return features if drop is None else drop(features, 0)

    def _tokens(self, x: Tensor) -> Tensor:
        """The class tokens of the last blocks, and the mean patch token of the last one, each normalized."""
        model: Any = self.model
        blocks = model.forward_intermediates(
            x, self._last_blocks, return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
        )
        return torch.cat([*(prefix[:, 0] for _, prefix in blocks), blocks[-1][0].mean(1)], dim=-1)

    def stages(self, x: Tensor, drop: Dropout | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The features, and the maps after the stem and after each block, for models that timm can take apart."""
        model: Any = self.model
        if self._last_blocks or not hasattr(model, "forward_intermediates"):
            return super().stages(x, drop)
        last, stages = model.forward_intermediates(self._laid_out(x))
        features: Tensor = model.forward_head(last, pre_logits=True)
        return features if drop is None else drop(features, 0), tuple(stages)

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.memory_format != torch.channels_last:
            return x
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # vmap has no contiguous(memory_format)


def _check_transformer(model: nn.Module, name: str, last_blocks: int, *, attention_only: bool) -> None:
    """Refuse what is for vision transformers with any other model."""
    blocks = len(getattr(model, "blocks", ())) if hasattr(model, "cls_token") else 0
    for option, given in (("last_blocks", last_blocks), ("attention_only", attention_only)):
        if given and not blocks:
            raise SandmaskError(
                f"The hyperparameter {option} is for vision transformers with a class token, such as "
                f"vit_small_patch14_dinov2.lvd142m. Found the network {name!r}."
            )
    if last_blocks > blocks:
        raise SandmaskError(f"last_blocks should be at most {blocks}, the blocks of {name!r}. Found {last_blocks}.")


def _unfuse_attention(model: nn.Module) -> None:
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            vars(part)["fused_attn"] = False
