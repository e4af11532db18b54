"""`multi_head_attention_forward` of `torch.nn.functional`, composed of layers that a tape supports."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.gradients._tape import UnsupportedError


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _embed_dim: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,  # noqa: ARG001 - there are both or none
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward` of inputs [length, N, width].

    Masks are added to the attention scores. `is_causal` can be ignored, because `torch.nn.MultiheadAttention` also
    passes the mask.
    """
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    special = add_zero_attn or bias_k is not None or others.get("static_k") is not None
    if special or query.ndim != 3 or not all(m.is_floating_point() for m in masks):
        raise UnsupportedError("attention is unbatched, adds keys to its inputs, or has masks that are not additive")
    inputs = [x.transpose(0, 1) for x in (query, key, value)]
    separate = others.get("use_separate_proj_weight", False)
    if query is key is value and in_proj_weight is not None and not separate:
        projected = F.linear(inputs[0], in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        if in_proj_weight is None or separate:
            own = tuple(others[f"{name}_proj_weight"] for name in "qkv")
        else:
            own = in_proj_weight.chunk(3)
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        projected = tuple(map(F.linear, inputs, own, biases))
    q, k, v = (torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2) for x in projected)
    mask = _merged(attn_mask, key_padding_mask, num_heads)
    dropout = dropout_p if training else 0.0
    weights = None
    if need_weights:
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        weights = F.dropout((logits if mask is None else logits + mask).softmax(-1), dropout)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    return F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1), weights


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int) -> Tensor | None:
    """Both masks as one, [N, heads, length, length]. A mask with three dimensions is [N * heads, length, length]."""
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = torch.unflatten(attn_mask, 0, (-1, num_heads))
    if key_padding_mask is None:
        return attn_mask
    padding = key_padding_mask[:, None, None]
    return padding if attn_mask is None else attn_mask + padding


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {F.multi_head_attention_forward: _attention}
