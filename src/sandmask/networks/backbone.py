"""Any timm backbone by name, as a featurizer."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sandmask.errors import SandmaskError
from sandmask.functional.dense import Dropout
from sandmask.networks._timm import create, feature_size
from sandmask.networks.batch_norm import unfreeze
from sandmask.networks.featurizer import EvaluatedModel
from sandmask.networks.weights import fit_weights

# Models with this many parameters or more are optimized for a single run, smaller ones for stacks of runs.
LARGE = 1_000_000


class Backbone(EvaluatedModel):
    """A timm model without its last layer, which returns pooled features.

    A large model uses fused attention, and the channels-last format for convolutions, which is fast on tensor cores.
    Under `torch.func.vmap`, both are slow or do not work, so a small model has neither and can be stacked.

    :param name: the name of the model in timm.
    :param input_shape: shape of one image.
    :param weights: a state dict to start from (see `load_weights`); None for timm's random initialization.
    :param source: name of the weights in messages.
    :param last_blocks: for vision transformers: number of last blocks whose class tokens are features, together with
        the mean patch token of the last block, as in linear probes of DINOv2; 0 for timm's pooled features.
    :param attention_only: for vision transformers: train only the attention layers.
    :param freeze_bn: False uses the statistics of the minibatch in training; see `batch_norm`.
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
        self._large = sum(p.numel() for p in self.model.parameters()) >= LARGE
        if not self._large:
            for part in self.model.modules():
                if hasattr(part, "fused_attn"):
                    vars(part)["fused_attn"] = False
        if not freeze_bn:
            unfreeze(self.model, name)
            self.stacks = False
        if attention_only:
            for parameter_name, parameter in self.model.named_parameters():
                parameter.requires_grad = ".attn." in parameter_name
        width = feature_size(copy.deepcopy(self.model).to("meta").eval(), name, input_shape)
        self.n_features = width * (1 + last_blocks) if last_blocks else width
        self.train()

    @property
    def memory_format(self) -> torch.memory_format:  # type: ignore[override]
        """The format of the weights of convolutions. It is a property, because `torch.save` cannot write it."""
        return torch.channels_last if self._large else torch.contiguous_format

    def compute(self, x: Tensor) -> Tensor:
        """Return the features without dropout."""
        if not self._last_blocks:
            return super().compute(self._laid_out(x))
        model: Any = self.model
        blocks = model.forward_intermediates(
            self._laid_out(x),
            self._last_blocks,
            return_prefix_tokens=True,
            norm=True,
            output_fmt="NLC",
            intermediates_only=True,
        )
        return torch.cat([*(prefix[:, 0] for _, prefix in blocks), blocks[-1][0].mean(1)], dim=-1)

    def stages(self, x: Tensor, drop: Dropout | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the features, and the outputs of the stem and of each block if timm provides them."""
        model: Any = self.model
        if self._last_blocks or not hasattr(model, "forward_intermediates"):
            return super().stages(x, drop)
        last, stages = model.forward_intermediates(self._laid_out(x))
        features: Tensor = model.forward_head(last, pre_logits=True)
        return features if drop is None else drop(features, 0), tuple(stages)

    def _laid_out(self, x: Tensor) -> Tensor:
        if not self._large:
            return x
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # vmap has no contiguous(memory_format)


def _check_transformer(model: nn.Module, name: str, last_blocks: int, *, attention_only: bool) -> None:
    """Raise an error if an option for vision transformers was given for another model."""
    blocks = len(getattr(model, "blocks", ())) if hasattr(model, "cls_token") else 0
    for option, given in (("last_blocks", last_blocks), ("attention_only", attention_only)):
        if given and not blocks:
            raise SandmaskError(
                f"The hyperparameter {option} is for vision transformers with a class token, such as "
                f"vit_small_patch14_dinov2.lvd142m. Found the network {name!r}."
            )
    if last_blocks > blocks:
        raise SandmaskError(f"last_blocks should be at most {blocks}, the blocks of {name!r}. Found {last_blocks}.")
