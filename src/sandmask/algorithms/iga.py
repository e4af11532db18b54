"""Inter-environmental gradient alignment (Koyama and Yamaguchi, 2020)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, ObjectiveAlgorithm
from sandmask.algorithms._functions import Hparams, State
from sandmask.functional import EnvBatch, Functional, Params
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform


class IGA(ObjectiveAlgorithm):
    """Minimize mean_e R_e + penalty * sum_e |grad R_e - mean_e' grad R_e'|^2.

    It makes no difference whether the mean gradient counts as a constant, because the deviations from it sum to zero.
    """

    by_environment = False
    divides = False

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean risk plus the weighted scatter of the environments' gradients."""

        # Networks that stack only with kernels have kernels with second derivatives. For others, `vmap` is faster.
        differentiate = Functional() if self.network.stacks else self.problem.differentiate
        gradients, risks = differentiate.inner_gradients(
            lambda params, batch: self.risks(params, batch, hparams), params, batch
        )
        return risks.mean() + hparams["penalty"] * scatter(gradients), {}


def scatter(gradients: Params) -> Tensor:
    """Return the sum over environments of the squared distance to the mean gradient; every tensor is [E, ...]."""
    distances = [(gradient - gradient.mean(0)).square().sum() for gradient in gradients.values()]
    return sum(distances[1:], distances[0])


ALGORITHMS.register(
    AlgorithmEntry(
        name="IGA",
        summary="Penalize the differences between the environments' gradients",
        paper="Koyama and Yamaguchi, Out-of-distribution generalization with maximal invariant predictor, "
        "arXiv:2008.01883v2, 2020",
        build=IGA,
        hparams=(Hparam("penalty", 1000.0, LogUniform(10, 1, 5), NON_NEGATIVE),),
    )
)
