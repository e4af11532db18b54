"""Base class of methods that combine whole gradients of environments, such as by their angles."""

from abc import abstractmethod

from torch import Tensor

from sandmask.algorithms._base import Algorithm, Hparams, Metrics, State, descend
from sandmask.functional.batch import EnvBatch


class CombinedGradients(Algorithm):
    """A method whose update is a function of all environments' gradients, which are kept at once."""

    @abstractmethod
    def combine(self, gradients: Tensor, hparams: Hparams, key: Tensor) -> Tensor:
        """The update's gradient [P], of the environments' [E, P]."""

    def direction(
        self, state: State, gradients: Tensor, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """The update's gradient; changes of the state and metrics, of which there are none."""
        return self.combine(gradients, hparams, key), {}, {}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        vectors, risks = state["params"].expand(batch.n_envs, -1), self.risks_by(hparams)
        gradients, values = self.problem.differentiate.environment_gradients(risks, vectors, batch)
        gradient = self.combine(gradients, hparams, key)
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": values.mean()}
