"""A minibatch of every training environment, as tensors that stack."""

from typing import NamedTuple

import torch
from torch import Tensor

from sandmask.functional import random


class EnvBatch(NamedTuple):
    """One minibatch of B examples from each of E environments. It is a pytree, so it works under `vmap`.

    `weight` is 1 for an example and 0 for padding. `example_keys` has a random key for every example. Random operations
    on an example, such as dropout, depend on its key and not on its position in the batch.
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
        """The inputs of all examples: [E * B, *input_shape]."""
        return self.x.flatten(0, 1)

    @property
    def environments(self) -> Tensor:
        """The index of the environment of each example: [E, B]."""
        return torch.arange(self.n_envs, device=self.y.device).unsqueeze(1).expand(self.y.shape)

    @property
    def positions(self) -> Tensor:
        """The position of each example among the examples of its environment without padding, from 0: [E, B]."""
        # Integers, because a GPU's cumulative sum of floats is not deterministic.
        return self.weight.to(torch.int64).cumsum(-1) - 1

    def shares(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight of each example in the mean over its environment: [E, B]."""
        weight = self.weight.to(dtype)
        return weight / weight.sum(-1, keepdim=True)

    def split(self, values: Tensor) -> Tensor:
        """Reshape [E * B, ...] to [E, B, ...], the inverse of `inputs`."""
        return values.view(*self.y.shape, *values.shape[1:])

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the examples of each environment, without padding: [E, B] -> [E]."""
        return (values * self.weight).sum(-1) / self.weight.sum(-1)

    def environment(self, e: int) -> "EnvBatch":
        """The batch of one environment, with E = 1."""
        return self.part(range(e, e + 1))

    def part(self, envs: range) -> "EnvBatch":
        """The batch of some consecutive environments."""
        return EnvBatch(*(field[envs.start : envs.stop] for field in self))

    def take(self, order: Tensor) -> "EnvBatch":
        """The batch of the environments with the indices in `order`. An index may occur more than once."""
        return EnvBatch(*(field[order] for field in self))


def make_batch(x: Tensor, y: Tensor, key: Tensor, weight: Tensor | None = None) -> EnvBatch:
    """Build a batch of E environments with B examples each.

    :param x: inputs `[E, B, ...]`.
    :param y: labels `[E, B]`.
    :param key: random key of the step.
    :param weight: 1 for examples and 0 for padding, `[E, B]`; no padding if not given.
    :return: the batch.
    """
    if weight is None:
        weight = torch.ones(y.shape, device=y.device)
    return EnvBatch(x, y, weight, random.keys(key, *y.shape))
