"""Means that follow the iterates of K runs: plain operations, or on a GPU one pass over memory for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask._physical import has_kernels


def follow(means: Sequence[Tensor], iterates: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Means [K, ...] after each iterate [K, ...] in turn has moved them towards itself.

    :param shares: How far, [means, iterates, K]: 0 leaves a mean as it is, 1 replaces it by the iterate.
    """
    if means and has_kernels(means[0]):
        from sandmask.functional.kernels import running_means as kernels

        return kernels.follow(means, iterates, shares)
    return plain_follow(means, iterates, shares)


def plain_follow(means: Sequence[Tensor], iterates: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """The same by torch's own operations."""
    return [_after(mean, iterates, own) for mean, own in zip(means, shares, strict=True)]


def _after(mean: Tensor, iterates: Sequence[Tensor], shares: Tensor) -> Tensor:
    for iterate, share in zip(iterates, shares, strict=True):
        mean = torch.lerp(mean, iterate, share.view(-1, *[1] * (mean.ndim - 1)))
    return mean
