"""Base classes of the gradient-mask methods: per-environment gradients, one mask, one Adam."""

from abc import abstractmethod

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm, Hparams, Metrics, Problem, State, descend, environment_risks
from sandmask.algorithms._diagnostics import DIAGNOSTICS, mask_diagnostics
from sandmask.functional.batch import EnvBatch
from sandmask.functional.differentiate import moments_of
from sandmask.functional.flat import Params
from sandmask.masks import Mask, MaskError, TensorMoments, rescale_by_sparsity


class MaskedAlgorithm(Algorithm):
    """A method that masks the mean of the environments' gradients, element by element.

    Where a run has the hyperparameter `rescale`, 1 divides the update by the mask's density, tensor by tensor.

    Networks whose layers fold their gradients into moments as they go sum no log-magnitudes: a mask that needs them is
    for a `LogMaskedAlgorithm`.
    """

    sums_logs = False

    @abstractmethod
    def mask(self, hparams: Hparams) -> Mask:
        """The mask for these hyperparameters."""

    def risks(self, params: Params, batch: EnvBatch, hparams: Hparams) -> Tensor:
        """The risks whose gradients are compared: [E]."""
        return environment_risks(self.logits(params, batch, hparams), batch)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""

        def risks(vector: Tensor, batch: EnvBatch) -> Tensor:
            return self.risks(self.network.unflatten(vector), batch, hparams)

        moments, values = self.problem.differentiate.environment_moments(
            risks, state["params"], batch, log_magnitude=self.sums_logs
        )
        return self.update(state, moments, values, hparams)

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """The second half of a step, once the moments of the gradients are known."""
        gradient, changes, metrics = self.masked(state, moments, hparams)
        stepped = {**state, **changes, **descend(state, gradient, state["adam"], hparams)}
        return stepped, {"loss": risks.mean(), **metrics}

    def terms(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """Values whose sum has environment e's gradient as its gradient by e's examples, and changes of the state."""
        return self.risks(params, batch, hparams), {}

    def finish(
        self, state: State, moments: TensorMoments, values: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        """`update`, of what `terms` gave."""
        return self.update(state, moments, values, hparams)

    def direction(
        self, state: State, gradients: Tensor, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """The update's gradient, of the environments' [E, P]; see `masked`."""
        return self.masked(state, moments_of(gradients, log_magnitude=self.sums_logs), hparams)

    def masked(self, state: State, moments: TensorMoments, hparams: Hparams) -> tuple[Tensor, State, Metrics]:
        """The update's gradient, of moments over environments; what the mask changes in the state; its metrics."""
        mask = self.mask(hparams)
        if mask.needs_log_magnitude and moments.log_sum is None:
            raise MaskError(
                f"{type(mask).__name__} needs sums of log-magnitudes, which a plain `MaskedAlgorithm` does not get. "
                f"Derive {type(self).__name__} from `sandmask.algorithms.LogMaskedAlgorithm`."
            )
        weights, gradient = mask.weigh(moments)
        if mask.rescale == "sparsity":
            gradient = self._rescale(gradient, weights)
        elif "rescale" in hparams:
            gradient = torch.where(hparams["rescale"] > 0, self._rescale(gradient, weights), gradient)
        return gradient, {}, self.metrics_of(weights, moments)

    def metrics_of(self, weights: Tensor, moments: TensorMoments) -> Metrics:
        """What there is to say about a mask [P]."""
        metrics = {"mask_density": weights.mean()}
        if self.problem.diagnostics:
            metrics[DIAGNOSTICS] = mask_diagnostics(weights, moments, self.network.slots)
        return metrics

    def _rescale(self, gradient: Tensor, weights: Tensor) -> Tensor:
        """Divide by the mask's density, tensor by tensor of the flat vector."""
        sizes = [slot.numel for slot in self.network.slots]
        pieces = zip(torch.split(gradient, sizes), torch.split(weights, sizes), strict=True)
        return torch.cat([rescale_by_sparsity(masked, mask) for masked, mask in pieces])


class LogMaskedAlgorithm(MaskedAlgorithm):
    """A `MaskedAlgorithm` whose mask needs sums of log-magnitudes: that of a `GeometricMean`."""

    sums_logs = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if problem.dtype == torch.float16:
            raise MaskError(
                "float16 is for masks without log-magnitudes: their gradients are scaled. Use bf16 or tf32."
            )

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update. A step of its own is taken as it is written, with gradients from `problem.differentiate`."""
        return super().step(state, batch, hparams, key)
