"""Projecting conflicting gradients (Yu et al., NeurIPS 2020)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams
from sandmask.algorithms._rules import CombinedGradients
from sandmask.functional import random


class PCGrad(CombinedGradients):
    """Remove from each g_e its component along every g_i that it conflicts with, and update by the mean of the results.

    p_e starts at g_e. For all i != e in random order, if p_e . g_i < 0, then p_e <- p_e - (p_e . g_i / |g_i|^2) g_i.
    The paper updates by sum_e p_e. Here, it is the mean, so that the weight decay has the same share as in ERM.

    A projection needs inner products of whole gradients, which elementwise moments do not contain. PCGrad is therefore
    not available as a mask.
    """

    def combine(self, gradients: Tensor, hparams: Hparams, key: Tensor) -> Tensor:
        """Return the mean of the projected gradients."""
        shares = projections(gradients @ gradients.T, random.permutation(key, len(gradients))).mean(0)
        return shares @ gradients


def projections(gram: Tensor, order: Tensor) -> Tensor:
    """Return coefficients [E, E] of the gradients, of which row e gives p_e, from their inner products [E, E]."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    rows = identity
    for chosen in identity[order]:  # one-hot: the gradient that the others are projected against
        products = gram @ chosen
        along, square = rows @ products, products @ chosen
        conflicts = (along < 0) & (chosen == 0) & (square > 0)
        part = torch.where(conflicts, along / torch.where(square > 0, square, 1.0), 0.0)
        rows = rows - part.unsqueeze(-1) * chosen
    return rows


ALGORITHMS.register(
    AlgorithmEntry(
        name="PCGrad",
        summary="Remove from each environment's gradient what conflicts with the others'",
        paper="Yu et al., Gradient surgery for multi-task learning, NeurIPS 2020",
        build=PCGrad,
    )
)
