"""Risk extrapolation by variance (Krueger et al., ICML 2021)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State, change_step, switched
from sandmask.functional import EnvBatch, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, IntLogUniform, LogUniform


class VREx(ObjectiveAlgorithm):
    """Minimize mean_e R_e + beta var_e(R_e), which is V-REx with the mean of the risks instead of their sum.

    beta is 1 before step `vrex_penalty_anneal_iters` and `vrex_lambda` from then on. Adam is reset at that step.
    """

    changes_at = ("vrex_penalty_anneal_iters",)

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean of the risks plus their weighted variance."""
        risks = self.risks(params, batch, hparams)
        mean = risks.mean()
        weight = switched(state, hparams, "vrex_penalty_anneal_iters", "vrex_lambda", before=1.0)
        return mean + weight * (risks - mean).square().mean(), {}


ALGORITHMS.register(
    AlgorithmEntry(
        name="VREx",
        summary="Add the variance of the environments' risks",
        paper="Krueger et al., Out-of-distribution generalization via risk extrapolation (REx), ICML 2021",
        build=VREx,
        hparams=(
            Hparam("vrex_lambda", 10.0, LogUniform(10, -1, 5), NON_NEGATIVE),
            *change_step(
                "vrex_penalty_anneal_iters", 500, IntLogUniform(10, 0, 4), recipe=(100, IntLogUniform(10, 0, 3.3))
            ),
        ),
    )
)
