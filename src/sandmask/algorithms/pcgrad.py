"""Projecting conflicting gradients (Yu et al., NeurIPS 2020)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams
from sandmask.algorithms._rules import CombinedGradients
from sandmask.functional import random


class PCGrad(CombinedGradients):
    """Each g_e loses its component along every g_i that it conflicts with: the update is the mean of what is left.

    For every environment e, and i != e in random order: where p_e . g_i < 0, p_e <- p_e - (p_e . g_i / |g_i|^2) g_i,
    from p_e = g_e. The paper updates by sum_e p_e; here it is the mean, whose share beside the weight decay is ERM's.

    A projection needs inner products of whole gradients, which elementwise moments do not have: PCGrad is an algorithm,
    and there is no mask of it.
    """

    def combine(self, gradients: Tensor, hparams: Hparams, key: Tensor) -> Tensor:
        """The mean of the projected gradients."""
        shares = projections(gradients @ gradients.T, random.permutation(key, len(gradients))).mean(0)
        return shares @ gradients


def projections(gram: Tensor, order: Tensor) -> Tensor:
    """Row e has the projected gradient p_e as a combination of the gradients, from their inner products [E, E]."""
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
