"""Empirical risk minimization (Vapnik, 1998): the mean loss over all environments' examples."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State
from sandmask.functional import EnvBatch, Params


class ERM(ObjectiveAlgorithm):
    """Minimize mean_e R_e, where R_e is the risk of environment e."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean of the environments' risks."""
        return self.risks(params, batch, hparams).mean(), {}


ALGORITHMS.register(
    AlgorithmEntry(
        name="ERM",
        summary="Minimize the mean loss over all training environments",
        paper="Vapnik, Statistical Learning Theory, 1998",
        build=ERM,
        compares_environments=False,
    )
)
