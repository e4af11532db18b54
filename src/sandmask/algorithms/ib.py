"""The information bottleneck, alone and with invariant risk minimization (Ahuja et al., NeurIPS 2021)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step, environment_risks, switched
from sandmask.algorithms.coral import centred_features
from sandmask.algorithms.irm import PENALTY, weighted_irm_penalty
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, IntLogUniform, LogUniform

BOTTLENECK = (
    Hparam("ib_lambda", 100.0, LogUniform(10, -1, 5), NON_NEGATIVE),
    *change_step("ib_penalty_anneal_iters", 500, IntLogUniform(10, 0, 4), recipe=(100, IntLogUniform(10, 0, 3.3))),
)
PAPER = (
    "Ahuja et al., Invariance principle meets information bottleneck for out-of-distribution generalization, "
    "NeurIPS 2021"
)


class IBERM(ObjectiveAlgorithm):
    """Minimize mean_e R_e + lambda mean_e V_e, where V_e = mean_j var_i(z_ij) is the variance of the features of e.

    z_ij is feature j of example i. The variances are unbiased (divided by B - 1). lambda is 0 before step
    `ib_penalty_anneal_iters` and `ib_lambda` from then on. Adam is reset at that step.
    """

    changes_at = ("ib_penalty_anneal_iters",)

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted variance of the features."""
        features = self.features(params, batch, hparams)
        risks = environment_risks(self.network.classify(params, features), batch)
        return risks.mean() + weighted_bottleneck(features, state, batch, hparams), {}


class IBIRM(ObjectiveAlgorithm):
    """Minimize mean_e R_e + lambda_IRM mean_e P_e + lambda_IB mean_e V_e, with IRM's penalty P and IB_ERM's variance V.

    lambda_IRM is 1 before step `irm_penalty_anneal_iters` and `irm_lambda` from then on. lambda_IB is 0 before step
    `ib_penalty_anneal_iters` and `ib_lambda` from then on. Adam is reset at both steps.
    """

    changes_at = ("irm_penalty_anneal_iters", "ib_penalty_anneal_iters")

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus both weighted penalties."""
        features = self.features(params, batch, hparams)
        logits = self.network.classify(params, features)
        invariance = weighted_irm_penalty(logits, state, batch, hparams)
        bottleneck = weighted_bottleneck(features, state, batch, hparams)
        return environment_risks(logits, batch).mean() + invariance + bottleneck, {}


def weighted_bottleneck(features: Tensor, state: State, batch: EnvBatch, hparams: Hparams) -> Tensor:
    """Return lambda mean_e V_e at this step."""
    weight = switched(state, hparams, "ib_penalty_anneal_iters", "ib_lambda")
    return weight * feature_variances(features, batch.weight).mean()


def feature_variances(features: Tensor, weight: Tensor) -> Tensor:
    """Return the mean over features of their unbiased variances in each environment: [E, B, F] -> [E]."""
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
ALGORITHMS.register(
    AlgorithmEntry(
        name="IB_IRM",
        summary="Add IRM's penalty and the variance of the features within each environment",
        paper=PAPER,
        build=IBIRM,
        hparams=(*PENALTY, *BOTTLENECK),
    )
)
