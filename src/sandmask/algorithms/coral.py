"""Deep CORAL between environments (Sun and Saenko, ECCV 2016), and the base class of MMD and CausIRL."""

from abc import abstractmethod

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, environment_risks
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform

GAMMA = Hparam("mmd_gamma", 1.0, LogUniform(10, -1, 1), NON_NEGATIVE)


class MatchingAlgorithm(ObjectiveAlgorithm):
    """Base class of methods that minimize mean_e R_e + gamma D, with a distance D of the features' distributions."""

    @abstractmethod
    def distance(self, features: Tensor, batch: EnvBatch, key: Tensor) -> Tensor:
        """Return D for features [E, B, F]; 0 for a single environment."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted distance."""
        features = self.features(params, batch, hparams)
        risks = environment_risks(self.network.classify(params, features), batch)
        return risks.mean() + hparams["mmd_gamma"] * self.distance(features, batch, key), {}


class CORAL(MatchingAlgorithm):
    """Minimize mean_e R_e + gamma mean_{i<j} (mean (mu_i - mu_j)^2 + mean (C_i - C_j)^2).

    mu_e and C_e are the mean and the covariance of the features of environment e. The inner means are over elements.
    """

    def distance(self, features: Tensor, batch: EnvBatch, key: Tensor) -> Tensor:
        """Return the mean squared differences of means and of covariances."""
        return coral_distance(features, batch.weight)


def coral_distance(features: Tensor, weight: Tensor) -> Tensor:
    """Return the mean squared differences of means and of covariances, for features [E, B, F] and weights [E, B]."""
    means, covariances = feature_moments(features, weight)
    return mean_pairwise_square(means) + mean_pairwise_square(covariances)


def feature_moments(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means [E, F] and the unbiased covariances [E, F, F] of the environments' features [E, B, F]."""
    means, centred, free = centred_features(features, weight)
    return means, centred.transpose(1, 2) @ centred / free.unsqueeze(-1)


def centred_features(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the environments' mean features [E, F], centred features [E, B, F] and divisors [E, 1].

    Centred features are 0 for padding. The divisor of unbiased variances and covariances is B - 1, and at least 1.
    """
    weight = weight.unsqueeze(-1)
    count = weight.sum(1)
    means = (features * weight).sum(1) / count
    return means, (features - means.unsqueeze(1)) * weight, (count - 1.0).clamp_min(1.0)


def mean_pairwise_square(values: Tensor) -> Tensor:
    """Return the mean over pairs i < j and over elements of (v_i - v_j)^2, for values [E, ...].

    It equals twice the unbiased variance over environments, which is computed without forming pairs.
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
