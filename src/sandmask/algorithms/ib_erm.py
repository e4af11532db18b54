"""The information bottleneck for empirical risk minimization (Ahuja et al., NeurIPS 2021)."""

from torch import Tensor

from sandmask.algorithms._base import (
    ALGORITHMS,
    AlgorithmEntry,
    Hparams,
    ObjectiveAlgorithm,
    State,
    environment_risks,
    switched,
)
from sandmask.algorithms._matching import centred_features
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params
from sandmask.hparams import NON_NEGATIVE, Hparam, IntLogUniform, LogUniform

BOTTLENECK = (
    Hparam("ib_lambda", 100.0, LogUniform(10, -1, 5), NON_NEGATIVE),
    Hparam("ib_penalty_anneal_iters", 500, IntLogUniform(10, 0, 4), NON_NEGATIVE),
)
PAPER = (
    "Ahuja et al., Invariance principle meets information bottleneck for out-of-distribution generalization, "
    "NeurIPS 2021"
)


class IBERM(ObjectiveAlgorithm):
    """min mean_e R_e + lambda mean_e V_e, V_e = mean_j var_i(z_ij): the variance of environment e's features.

    The variances are unbiased (divided by B - 1). lambda is 0 before step `ib_penalty_anneal_iters`, `ib_lambda` from
    there on; Adam is reset there.
    """

    changes_at = ("ib_penalty_anneal_iters",)

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted variance of the features."""
        features = self.features(params, batch, hparams)
        risks = environment_risks(self.network.classify(params, features), batch)
        penalty = feature_variances(features, batch.weight).mean()
        return risks.mean() + bottleneck_weight(state, hparams) * penalty, {}


def bottleneck_weight(state: State, hparams: Hparams) -> Tensor:
    """The weight of the bottleneck at this step."""
    return switched(state, hparams, "ib_penalty_anneal_iters", "ib_lambda")


def feature_variances(features: Tensor, weight: Tensor) -> Tensor:
    """The mean over features of their unbiased variance in each environment: [E, B, F] -> [E]."""
    _, centred, free = centred_features(features, weight)
    return (centred.square().sum(1) / free).mean(-1)


ALGORITHMS.register(
    AlgorithmEntry(
        name="IB_ERM",
        summary="Penalize the variance of the features within each environment",
        paper=PAPER,
        build=IBERM,
        compares_environments=False,
        hparams=BOTTLENECK,
    )
)
