"""A minibatch of every training environment, as tensors that stack."""

from typing import NamedTuple

import torch
from torch import Tensor

from sandmask.functional import random


class EnvBatch(NamedTuple):
    """One minibatch from each of E environments, B examples each; a pytree, so it works under `vmap`.

    `weight` is 1 for an example and 0 for padding. `example_keys` holds a random key for every example: what is
    random about an example (dropout, say) follows its key, wherever in a batch the example stands.
    """

    x: Tensor  # [E, B, *input_shape]
    y: Tensor  # [E, B] int64
    weight: Tensor  # [E, B]
    example_keys: Tensor  # [E, B] int64

    @property
    def n_envs(self) -> int:
        """E."""
        return self.y.shape[0]

    @property
    def inputs(self) -> Tensor:
        """All examples in one row: [E * B, *input_shape]."""
        return self.x.flatten(0, 1)

    @property
    def environments(self) -> Tensor:
        """The number of each example's environment: [E, B]."""
        return torch.arange(self.n_envs, device=self.y.device).unsqueeze(1).expand(self.y.shape)

    @property
    def places(self) -> Tensor:
        """The place of each example among the true ones of its environment, from 0: [E, B]."""
        # In integers, as a GPU's running sum of floats is not deterministic.
        return self.weight.to(torch.int64).cumsum(-1) - 1

    def shares(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The share of each example in its environment's mean: [E, B]."""
        weight = self.weight.to(dtype)
        return weight / weight.sum(-1, keepdim=True)

    def split(self, values: Tensor) -> Tensor:
        """The inverse: [E * B, ...] back to [E, B, ...]."""
        return values.view(*self.y.shape, *values.shape[1:])

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each environment's true examples: [E, B] -> [E]."""
        return (values * self.weight).sum(-1) / self.weight.sum(-1)

    def environment(self, e: int) -> "EnvBatch":
        """The batch of one environment, with E = 1."""
        return self.part(range(e, e + 1))

    def part(self, envs: range) -> "EnvBatch":
        """The batch of some environments that follow each other."""
        return EnvBatch(*(field[envs.start : envs.stop] for field in self))

    def take(self, order: Tensor) -> "EnvBatch":
        """The batch of the environments numbered in `order`, one after the other; a number may come twice."""
        return EnvBatch(*(field[order] for field in self))


def make_batch(x: Tensor, y: Tensor, key: Tensor, weight: Tensor | None = None) -> EnvBatch:
    """Build a batch of E environments with B examples each.

    :param x: inputs `[E, B, ...]`.
    :param y: labels `[E, B]`.
    :param key: random key of the step.
    :param weight: 1 for examples and 0 for padding, `[E, B]`; no padding if not given.
    """
    if weight is None:
        weight = torch.ones(y.shape, device=y.device)
    return EnvBatch(x, y, weight, random.keys(key, *y.shape))
