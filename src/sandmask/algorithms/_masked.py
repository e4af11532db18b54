"""What the gradient-mask methods share: per-environment gradients, one mask, one Adam."""

from abc import abstractmethod

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm, Hparams, Metrics, State, descend, environment_risks
from sandmask.algorithms._diagnostics import DIAGNOSTICS, mask_diagnostics
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params
from sandmask.masks import Mask, TensorMoments, rescale_by_sparsity


class MaskedAlgorithm(Algorithm):
    """A method that masks the mean of the environments' gradients, element by element.

    `rescaled` divides each tensor's update by the mean of its mask plus 1e-10, as ILC's and DomainBed's code
    do; the paper's equation does not.
    """

    rescaled = False

    @abstractmethod
    def mask(self, hparams: Hparams) -> Mask:
        """The mask for these hyperparameters."""

    def risks(self, params: Params, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """What each environment's gradient is taken of: [E]."""
        return environment_risks(self.logits(params, batch, hparams), batch)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:  # noqa: ARG002
        """One update."""

        def risks(vector: Tensor, batch: EnvBatch) -> Tensor:
            return self.risks(self.network.unflatten(vector), batch, hparams)

        moments, values = self.problem.differentiate.environment_moments(risks, state["params"], batch)
        return self.update(state, moments, values, hparams)

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """The second half of a step, once the moments of the gradients are known."""
        weights, gradient = self.mask(hparams).weigh(moments)
        if self.rescaled:
            gradient = self._rescale(gradient, weights)
        metrics = {"loss": risks.mean(), "mask_density": weights.mean()}
        if self.problem.diagnostics:
            metrics[DIAGNOSTICS] = mask_diagnostics(weights, moments, self.network.slots)
        return {**state, **descend(state, gradient, state["adam"], hparams)}, metrics

    def _rescale(self, gradient: Tensor, weights: Tensor) -> Tensor:
        """Divide by the mask's density, tensor by tensor of the flat vector."""
        sizes = [slot.numel for slot in self.network.slots]
        pieces = zip(torch.split(gradient, sizes), torch.split(weights, sizes), strict=True)
        return torch.cat([rescale_by_sparsity(masked, mask) for masked, mask in pieces])
