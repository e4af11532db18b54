"""CausIRL: invariance to mixtures of the environments (Chevalley et al., 2022), with the distances of CORAL and MMD."""

from abc import abstractmethod

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms.coral import GAMMA, MatchingAlgorithm, coral_distance
from sandmask.algorithms.mmd import attached, kernel_sum
from sandmask.functional import EnvBatch, random

PAPER = "Chevalley et al., Invariant causal mechanisms through distribution matching, 2022"


class CausIRL(MatchingAlgorithm):
    """Minimize mean_e R_e + gamma D(P, Q), where P and Q are two random mixtures of the environments' features.

    P has the first s_e examples of every environment e, and Q has the others. s_e is drawn uniformly from 0 to B - 1 at
    every step. There is no penalty if P or Q has fewer than two examples.
    """

    @abstractmethod
    def distance_of_parts(self, features: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return D for features [E, B, F]. The weights [E, B] are 1 for the examples of P (`first`) or Q (`second`)."""

    def distance(self, features: Tensor, batch: EnvBatch, key: Tensor) -> Tensor:
        """Return D for random mixtures, or 0 if one of them has fewer than two examples."""
        first = random_part(batch, key)
        second = batch.weight - first
        enough = torch.logical_and(first.sum() >= 2, second.sum() >= 2)
        # If there are too few examples, both mixtures are all examples, so that value and gradient are not NaN.
        parts = (torch.where(enough, part, batch.weight) for part in (first, second))
        return torch.where(enough, self.distance_of_parts(features, *parts), 0.0)


class CausIRLCORAL(CausIRL):
    """CausIRL with the distance of CORAL, D = mean (mu_P - mu_Q)^2 + mean (C_P - C_Q)^2."""

    def distance_of_parts(self, features: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return the mean squared differences of means and of covariances."""
        both = features.flatten(0, 1).expand(2, -1, -1)
        return coral_distance(both, torch.stack([first.flatten(), second.flatten()]))


class CausIRLMMD(CausIRL):
    """CausIRL with the distance and the kernels of MMD, D = K_PP + K_QQ - 2 K_PQ."""

    def distance_of_parts(self, features: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return the squared discrepancy. Its gradient is computed explicitly, as in MMD."""
        known = features.detach()
        return attached(features, *discrepancy_of_parts(known, first.to(known.dtype), second.to(known.dtype)))


def random_part(batch: EnvBatch, key: Tensor) -> Tensor:
    """Return the weights [E, B] of P: 1 for the first s_e examples of environment e, without padding."""
    counts = batch.weight.to(torch.int64).sum(-1)
    cuts = random.integers(key, counts, batch.n_envs)
    return batch.weight * (batch.positions < cuts.unsqueeze(-1))


def discrepancy_of_parts(features: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return K_PP + K_QQ - 2 K_PQ, and its gradient with respect to the features [E, B, F].

    It is sum_ij c_i c_j k(x_i, x_j), where c_i is 1 / |P| in P and -1 / |Q| in Q.
    """
    signed = first / first.sum() - second / second.sum()
    true = first + second
    points = features - (true.unsqueeze(-1) * features).sum((0, 1)) / true.sum()
    return kernel_sum(points, signed, [signed.flatten()] * len(points))


ALGORITHMS.register(
    AlgorithmEntry(
        name="CausIRL_CORAL",
        summary="Match the means and covariances of two random mixtures of the environments",
        paper=PAPER,
        build=CausIRLCORAL,
        hparams=(GAMMA,),
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="CausIRL_MMD",
        summary="Match the distributions of two random mixtures of the environments, by Gaussian kernels",
        paper=PAPER,
        build=CausIRLMMD,
        hparams=(GAMMA,),
    )
)
