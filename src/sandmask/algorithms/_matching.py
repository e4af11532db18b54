"""Moments of features, and the base class of CORAL and MMD: the risk plus a distance between environments."""

from abc import abstractmethod

from torch import Tensor

from sandmask.algorithms._base import Hparams, ObjectiveAlgorithm, State, environment_risks
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform

GAMMA = Hparam("mmd_gamma", 1.0, LogUniform(10, -1, 1), NON_NEGATIVE)


def centred_features(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each environment's mean feature [E, D], the features less that (0 for padding) [E, B, D], and B - 1 or 1 [E, 1].

    The last is what unbiased variances and covariances are divided by.
    """
    weight = weight.unsqueeze(-1)
    count = weight.sum(1)
    means = (features * weight).sum(1) / count
    return means, (features - means.unsqueeze(1)) * weight, (count - 1.0).clamp_min(1.0)


class MatchingAlgorithm(ObjectiveAlgorithm):
    """min mean_e R_e + gamma * mean over pairs of environments of the distance of their features."""

    @abstractmethod
    def distance(self, features: Tensor, weight: Tensor) -> Tensor:
        """The mean over pairs, of features [E, B, D] and weights [E, B]; 0 for a single environment."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted distance."""
        features = self.features(params, batch, hparams)
        risks = environment_risks(self.network.classify(params, features), batch)
        return risks.mean() + hparams["mmd_gamma"] * self.distance(features, batch.weight), {}
