"""Pairs of examples of a minibatch (for CAD and ADRMX)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sandmask.functional.batch import EnvBatch


class Pairs(NamedTuple):
    """Properties of pairs of examples, [N, N], without padding."""

    other: Tensor  # j is another example than i
    same_class: Tensor
    same_environment: Tensor


def pairs_of(batch: EnvBatch) -> Pairs:
    """The pairs of a batch."""
    true, y = batch.weight.flatten() > 0, batch.y.flatten()
    numbers, environments = torch.arange(len(y), device=y.device), batch.environments.flatten()
    other = true & true.unsqueeze(-1) & (numbers != numbers.unsqueeze(-1))
    return Pairs(other, y == y.unsqueeze(-1), environments == environments.unsqueeze(-1))
