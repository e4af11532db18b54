"""Deep CORAL between environments (Sun and Saenko, ECCV 2016)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._matching import GAMMA, MatchingAlgorithm, centred_features


class CORAL(MatchingAlgorithm):
    """min mean_e R_e + gamma mean_{i<j} (mean (mu_i - mu_j)^2 + mean (C_i - C_j)^2).

    mu_e and C_e are the mean and covariance of environment e's features; the inner means are over elements.
    """

    def distance(self, features: Tensor, weight: Tensor) -> Tensor:
        """The squared differences of means and of covariances."""
        means, covariances = feature_moments(features, weight)
        return mean_pairwise_square(means) + mean_pairwise_square(covariances)


def feature_moments(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Means [E, D] and unbiased covariances [E, D, D] of each environment's features [E, B, D]."""
    means, centred, free = centred_features(features, weight)
    return means, centred.transpose(1, 2) @ centred / free.unsqueeze(-1)


def mean_pairwise_square(values: Tensor) -> Tensor:
    """The mean over pairs i < j and over elements of (v_i - v_j)^2, of values [E, ...].

    It is twice the unbiased variance over environments, so that the pairs need not be formed.
    """
    n_envs = values.shape[0]
    return (values - values.mean(0)).square().sum(0).mean() * (2.0 / max(n_envs - 1, 1))


ALGORITHMS.register(
    AlgorithmEntry(
        name="CORAL",
        summary="Match the means and covariances of the environments' features",
        paper="Sun and Saenko, Deep CORAL: correlation alignment for deep domain adaptation, ECCV 2016",
        build=CORAL,
        hparams=(GAMMA,),
    )
)
