"""GENIE with the signal-to-noise ratio over environments instead of time: our variant."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, Algorithm, AlgorithmEntry, Hparams, Metrics, State
from sandmask.algorithms.genie import HPARAMS, PAPER, moved, weighed
from sandmask.functional.batch import EnvBatch


class EnvironmentGENIE(Algorithm):
    """w <- w - a u / (1 - p) for a random share 1 - p of the parameters, u = k q m + (1 - k) n: GENIE's step.

    m is the mean of the environments' gradients, weight decay included, and s2 their unbiased variance over
    environments, 1e-8 where that is 0. The share of s2 that is left in m is r = 1 / E:

    - q = 1 / (1 + s2 / (E (m^2 + 1e-8))), k = tanh(min(1 / s2, 10)), and n as in GENIE.

    There is no memory: every step has the gradients of one minibatch. k depends on the scale of the gradients, like the
    released SAND-mask.
    """

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        risks, differentiate = self.risks_by(hparams), self.problem.differentiate
        moments, values = differentiate.environment_moments(risks, state["params"], batch)
        mean = moments.mean + hparams["weight_decay"] * state["params"]
        found = weighed(mean, moments.m2 / max(moments.count - 1, 1), 1.0 / moments.count)
        params = moved(state["params"], found, self.network, hparams, key)
        return {**state, "params": params, "step": state["step"] + 1}, {"loss": values.mean()}


ALGORITHMS.register(
    AlgorithmEntry(
        name="GENIE-environments",
        summary="GENIE with the signal-to-noise ratio over environments instead of time",
        paper=f"a variant of ours; {PAPER}",
        build=EnvironmentGENIE,
        hparams=HPARAMS,
    )
)
