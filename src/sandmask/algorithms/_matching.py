"""Base class of CORAL and MMD: the risk plus a weighted distance between the environments' features."""

from abc import abstractmethod

from torch import Tensor

from sandmask.algorithms._base import Hparams, ObjectiveAlgorithm, State, environment_risks
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform

GAMMA = Hparam("mmd_gamma", 1.0, LogUniform(10, -1, 1), NON_NEGATIVE)


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
