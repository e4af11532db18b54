"""Your own training method, in one file:

    sandmask train Spirals SoftAND --test-env 0 --plugin examples/plugins/my_method.py
    sandmask hparams SoftAND Spirals --hparams-seed 3 --plugin examples/plugins/my_method.py

`step` is written for one run. It does not branch on a tensor's value and computes gradients with
`problem.differentiate`, so that a sweep can train hundreds of runs as one program.
"""

from torch import Tensor

from sandmask.algorithms import ALGORITHMS, Algorithm, AlgorithmEntry, Hparams, Metrics, State, descend
from sandmask.functional import EnvBatch
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform
from sandmask.masks import agreement


class SoftAND(Algorithm):
    """update = A^p * mean_e(g_e), A = |mean_e sign(g_e)|, p = `power`.

    Between two known methods: p = 0 is ERM, p -> infinity the AND-mask with tau = 1. In between, an element
    that the environments disagree on is slowed down rather than frozen.
    """

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:  # noqa: ARG002
        """One update; `key` is for methods that draw random numbers."""
        risks = self.risks_by(hparams)  # a function of the vector of parameters and the batch
        moments, values = self.problem.differentiate.environment_moments(risks, state["params"], batch)
        weights = agreement(moments.sign_sum, moments.count) ** hparams["power"]
        changes = descend(state, weights * moments.mean, state["adam"], hparams)
        return {**state, **changes}, {"loss": values.mean(), "mean_weight": weights.mean()}


ALGORITHMS.register(
    AlgorithmEntry(
        name="SoftAND",
        summary="Slow down what the environments disagree on",
        paper="An example",
        build=SoftAND,
        hparams=(Hparam("power", 2.0, LogUniform(2, -2, 3), NON_NEGATIVE),),
    )
)
