"""The information bottleneck with invariant risk minimization (Ahuja et al., NeurIPS 2021)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams, ObjectiveAlgorithm, State, environment_risks
from sandmask.algorithms.ib_erm import BOTTLENECK, PAPER, bottleneck_weight, feature_variances
from sandmask.algorithms.irm import PENALTY, irm_penalty, irm_weight
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params


class IBIRM(ObjectiveAlgorithm):
    """min mean_e R_e + lambda_IRM mean_e P_e + lambda_IB mean_e V_e: IRM's penalty P and IB_ERM's variance V.

    lambda_IRM is 1 before step `irm_penalty_anneal_iters` and `irm_lambda` from there on; lambda_IB is 0 before step
    `ib_penalty_anneal_iters` and `ib_lambda` from there on. Adam is reset at both steps.
    """

    changes_at = ("irm_penalty_anneal_iters", "ib_penalty_anneal_iters")

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus both weighted penalties."""
        features = self.features(params, batch, hparams)
        logits = self.network.classify(params, features)
        invariance = irm_weight(state, hparams) * irm_penalty(logits, batch).mean()
        bottleneck = bottleneck_weight(state, hparams) * feature_variances(features, batch.weight).mean()
        return environment_risks(logits, batch).mean() + invariance + bottleneck, {}


ALGORITHMS.register(
    AlgorithmEntry(
        name="IB_IRM",
        summary="Add IRM's penalty and the variance of the features within each environment",
        paper=PAPER,
        build=IBIRM,
        hparams=(*PENALTY, *BOTTLENECK),
    )
)
