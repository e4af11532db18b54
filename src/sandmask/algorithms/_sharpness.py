"""Base class of SAM, GSAM and SAGM: a second gradient after a step uphill."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm, Hparams, Metrics, State, descend
from sandmask.functional.batch import EnvBatch
from sandmask.hparams import NON_NEGATIVE, Choice, Hparam

RHO = Hparam("rho", 0.05, Choice(0.01, 0.02, 0.05, 0.1), NON_NEGATIVE)
_EPSILON = 1e-12


class SharpnessAware(Algorithm):
    """g = grad R(w), g_p = grad R(w + reach g), R = mean_e R_e; Adam takes a combination of both.

    Both gradients are of the same minibatch and the same dropout. A step costs two of ERM's.
    """

    def reach(self, norm: Tensor, hparams: Hparams) -> Tensor:
        """The length of the step uphill along a gradient of this norm: rho / |g|."""
        return hparams["rho"] / (norm + _EPSILON)

    @abstractmethod
    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """The update's gradient, of g and g_p."""

    def aware(self, here: Tensor, params: Tensor, gradient_at: Callable[[Tensor], Tensor], hparams: Hparams) -> Tensor:
        """The update's gradient, of the one at these parameters and of what the gradient is elsewhere."""
        norm = torch.linalg.vector_norm(here)
        return self.combine(here, gradient_at(params + self.reach(norm, hparams) * here), hparams)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        here, loss = self.risk_gradient(state["params"], batch, hparams)
        gradient = self.aware(
            here, state["params"], lambda vector: self.risk_gradient(vector, batch, hparams)[0], hparams
        )
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": loss}
