"""Dropout whose noise belongs to the example, not to its place in a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sandmask.functional import random


@dataclass(frozen=True)
class Dropout:
    """Drops units at `rate` (a per-run tensor). `keys` holds one random key per example: [N]."""

    rate: Tensor
    keys: Tensor

    def __call__(self, x: Tensor, site: int) -> Tensor:
        """Drop units of x `[N, features]`; every `site` in a network draws noise of its own."""
        noise = random.uniform(random.fold(self.keys, site), x.shape[-1])
        return torch.where(noise >= self.rate, x / (1.0 - self.rate), 0.0)
