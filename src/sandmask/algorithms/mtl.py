"""Marginal transfer learning (Blanchard et al., JMLR 2021): the classifier also sees a summary of the environment."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, environment_risks
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import FRACTION, Choice, Hparam
from sandmask.networks import Network


class MTL(ObjectiveAlgorithm):
    """Minimize mean_e R_e(c([f(x), m_e])), where m_e is a running mean of the features f(x) of environment e.

    m_e <- a mean_x f(x) + (1 - a) m_e, where a = `mtl_ema`, and c is the classifier. The embedding m_e describes the
    distribution of the environment. As in DomainBed's code, a is the weight of the new minibatch, so that a = 1 has no
    memory, and gradients flow through the new minibatch only. At test time, m is the mean feature of the batch.
    (DomainBed overwrites m with noise before that; here, it is kept.)
    """

    uses_context = True

    def build_network(self) -> Network:
        """Build a network whose classifier takes the features and the embedding."""
        problem = self.problem
        with torch.random.fork_rng(devices=[]):
            n_features = problem.featurizer().n_features
        return Network(problem.featurizer, problem.n_classes, n_features, problem.dtype, nonlinear=problem.nonlinear)

    def extra_state(self, seed: int) -> State:
        """Return an embedding for each environment."""
        return {"embeddings": torch.zeros(self.problem.n_envs, self.network.n_features)}

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean of the environments' risks, each with its own embedding."""
        features = self.features(params, batch, hparams)
        mean = (batch.shares().unsqueeze(-1) * features).sum(1)
        embeddings = hparams["mtl_ema"] * mean + (1.0 - hparams["mtl_ema"]) * state["embeddings"]
        seen = torch.cat([features, embeddings.unsqueeze(1).expand_as(features)], dim=-1)
        logits = batch.split(self.network.classify(params, seen.flatten(0, 1)))
        return environment_risks(logits, batch).mean(), {"embeddings": embeddings.detach()}

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Return the logits of a batch of one environment, whose embedding is its mean feature."""
        params = self.network.unflatten(state["params"])
        features = self.network.features(params, x)
        embedding = features.mean(0, keepdim=True).expand_as(features)
        return self.network.classify(params, torch.cat([features, embedding], dim=-1))


ALGORITHMS.register(
    AlgorithmEntry(
        name="MTL",
        summary="Show the classifier a running mean of the environment's features",
        paper="Blanchard et al., Domain generalization by marginal transfer learning, JMLR 2021",
        build=MTL,
        hparams=(Hparam("mtl_ema", 0.99, Choice(0.5, 0.9, 0.99, 1.0), FRACTION),),
    )
)
