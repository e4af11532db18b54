"""Style and content of feature vectors, exchanged between the examples of a batch (for SagNet)."""

import torch
from torch import Tensor

from sandmask.functional import random
from sandmask.functional.batch import EnvBatch

_EPSILON = 1e-5


class Exchange:
    """A random partner for every example of a batch, and a ratio, both drawn by the examples' own keys."""

    def __init__(self, batch: EnvBatch, key: Tensor) -> None:
        rows = random.fold(batch.example_keys.flatten(), key)
        true = batch.weight.flatten() > 0
        self.ratio = random.uniform(random.fold(rows, 0)).unsqueeze(-1)
        # The n-th true example is given the n-th of the true examples in random order: padding takes no part.
        shuffled = torch.where(true, random.uniform(random.fold(rows, 1)), 2.0).argsort(stable=True)
        self.partner = shuffled[(true.cumsum(0) - 1).clamp_min(0)]

    def mix_styles(self, features: Tensor) -> Tensor:
        """Features [N, F] whose styles lie between their own and their partner's."""
        content, mean, variance = take_apart(features)
        mean = self.ratio * mean + (1.0 - self.ratio) * mean[self.partner]
        variance = self.ratio * variance + (1.0 - self.ratio) * variance[self.partner]
        return content * (variance + _EPSILON).sqrt() + mean

    def swap_contents(self, features: Tensor) -> Tensor:
        """Features [N, F] of their own style and their partner's content, which counts as a constant."""
        content, mean, variance = take_apart(features)
        return content[self.partner].detach() * (variance + _EPSILON).sqrt() + mean


def take_apart(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Content [N, F], the normalized features, and style: their means and variances, [N, 1] each."""
    mean = features.mean(-1, keepdim=True)
    variance = features.var(-1, keepdim=True)
    return (features - mean) / (variance + _EPSILON).sqrt(), mean, variance
