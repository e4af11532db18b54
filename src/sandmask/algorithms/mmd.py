"""Maximum mean discrepancy between environments (Li et al., CVPR 2018; Gretton et al., JMLR 2012)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms.coral import GAMMA, MatchingAlgorithm
from sandmask.functional import EnvBatch

SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)


class MMD(MatchingAlgorithm):
    """Minimize mean_e R_e + gamma mean_{i<j} (K_ii + K_jj - 2 K_ij).

    K_ij is the mean of k(x, x') over the features x of environment i and x' of environment j. The kernel is
    k(x, x') = sum_s exp(-s |x - x'|^2) with s in SCALES.
    """

    def distance(self, features: Tensor, batch: EnvBatch, key: Tensor) -> Tensor:
        """Return the squared discrepancy. Its gradient is computed explicitly, not by autograd; see `discrepancy`."""
        return attached(features, *discrepancy(features.detach(), batch.weight))


def attached(features: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """Return `value` as a tensor whose gradient with respect to `features` is `gradient`."""
    return value + ((features - features.detach()) * gradient).sum()


def discrepancy(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over pairs of K_ii + K_jj - 2 K_ij, and its gradient with respect to the features [E, B, D].

    Both are computed together, for the rows of one environment at a time. Autograd would keep the seven kernels between
    all examples, which take gigabytes per run for 16 environments of 512 examples.
    """
    n_envs = features.shape[0]
    weight = weight.to(features.dtype)
    share = weight / weight.sum(-1, keepdim=True)  # the weight of an example in its environment's mean
    # The sum over pairs i < j of K_ii + K_jj - 2 K_ij equals sum_ij (E 1[i = j] - 1) K_ij.
    pairs = n_envs * max(n_envs - 1, 1) / 2
    factors = (n_envs * torch.eye(n_envs, dtype=features.dtype, device=features.device) - 1.0) / pairs
    # The kernel depends only on differences. Centring makes the squares small that are subtracted from each other.
    points = features - (share.unsqueeze(-1) * features).sum((0, 1)) / n_envs
    return kernel_sum(points, share, [(of_pairs.unsqueeze(-1) * share).flatten() for of_pairs in factors])


def kernel_sum(points: Tensor, share: Tensor, to: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return sum_e sum_(i of e) sum_j share_i to_ej k(x_i, x_j), where j is any example, and its gradient.

    The terms should be symmetric in i and j. `points` is [E, B, D], `share` is [E, B], and `to` has a vector [E * B]
    for each environment.
    """
    everyone = points.flatten(0, 1)
    numbers = torch.arange(len(everyone), device=points.device)
    values, gradients = [], []
    for e in range(len(points)):
        kernel, slope = kernel_and_slope(squared_distances(points[e], everyone))
        values.append(share[e] @ kernel @ to[e])
        # d k(|x - x'|^2) / dx = 2 k' (x - x'), and K is symmetric, so every x occurs twice. The terms of an example
        # with itself are left out: they would cancel only up to rounding, and their k' is the largest of all.
        itself = numbers == numbers.view(share.shape)[e].unsqueeze(-1)
        pull = torch.where(itself, 0.0, slope * to[e])
        gradient = pull.sum(-1, keepdim=True) * points[e] - pull @ everyone
        gradients.append(4.0 * share[e].unsqueeze(-1) * gradient)
    return torch.stack(values).sum(), torch.stack(gradients)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return |a_i - b_j|^2 for all pairs of rows: [N, D], [M, D] -> [N, M]."""
    squares = a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1)
    distances = squares - 2.0 * (a @ b.T)
    noise = 4.0 * torch.finfo(squares.dtype).eps * squares  # smaller distances are rounding errors
    return torch.where(distances > noise, distances, 0.0)


def kernel_and_slope(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return k = sum_s exp(-s d) and dk / dd for squared distances d."""
    kernel, slope = torch.zeros_like(distances), torch.zeros_like(distances)
    for scale in SCALES:
        term = torch.exp(-scale * distances)
        kernel, slope = kernel + term, slope - scale * term
    return kernel, slope


ALGORITHMS.register(
    AlgorithmEntry(
        name="MMD",
        summary="Match the distributions of the environments' features, by Gaussian kernels",
        paper="Li et al., Domain generalization with adversarial feature learning, CVPR 2018",
        build=MMD,
        hparams=(GAMMA,),
    )
)
