"""Base classes of methods that change gradients: sharpness-aware methods, and rules for environments' gradients.

A rule is a mask, which works element by element, or combines whole gradients. See `_composed` for compositions.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm, Problem
from sandmask.algorithms._functions import Hparams, Metrics, State, descend
from sandmask.functional import EnvBatch, Params
from sandmask.functional.differentiate import moments_of
from sandmask.functional.flat import Slot
from sandmask.functional.ranks import Reads
from sandmask.functional.rescaling import rescale_tensors
from sandmask.masks import Mask, MaskError, TensorMoments, agreement_counts

DIAGNOSTICS = "diagnostics"  # the metric that is a vector; its entries go by the names of `diagnostic_names`
BINS = 10
_EPSILON = 1e-12


class SharpnessAware(Algorithm):
    """g = grad R(w), g_p = grad R(w + reach g), R = mean_e R_e; Adam takes a combination of both.

    Both gradients are of the same minibatch and the same dropout. A step costs two of ERM's.
    """

    reads: Reads = "examples"

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


class CombinedGradients(Algorithm):
    """A method whose update is a function of all environments' gradients, which are kept at once."""

    reads: Reads = "environments"

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


class MaskedAlgorithm(Algorithm):
    """A method that masks the mean of the environments' gradients, element by element.

    Where a run has the hyperparameter `rescale`, 1 divides the update by the mask's density, tensor by tensor.

    Networks whose layers fold their gradients into moments as they go sum no log-magnitudes: a mask that needs them is
    for a `LogMaskedAlgorithm`.
    """

    reads: Reads = "environments"
    sums_logs = False

    @property
    def through_logits(self) -> bool:
        """Whether all gradients pass the classifier, where they can be scaled: not known of losses of one's own."""
        kind = type(self)
        own = kind.risks is Algorithm.risks and kind.logits is Algorithm.logits
        return own and kind.terms is MaskedAlgorithm.terms

    @abstractmethod
    def mask(self, hparams: Hparams) -> Mask:
        """The mask for these hyperparameters."""

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        moments, risks = self.problem.differentiate.environment_moments(
            self.risks_by(hparams), state["params"], batch, log_magnitude=self.sums_logs
        )
        return self.update(state, moments, risks, hparams)

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """The second half of a step, once the moments of the gradients are known."""
        gradient, changes, metrics = self.masked(state, moments, hparams)
        stepped = {**state, **changes, **descend(state, gradient, state["adam"], hparams)}
        return stepped, {"loss": risks.mean(), **metrics}

    def terms(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """Values, and changes of the state. The gradient of their sum through the examples of e is that of e."""
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
        if not isinstance(mask, Mask):
            raise MaskError(f"{type(self).__name__}.mask should return a `Mask`. Found {type(mask).__name__}.")
        if mask.needs_log_magnitude and moments.log_sum is None:
            raise MaskError(
                f"{type(mask).__name__} needs sums of log-magnitudes, which a plain `MaskedAlgorithm` does not get. "
                f"Derive {type(self).__name__} from `sandmask.algorithms.LogMaskedAlgorithm`."
            )
        weights, gradient = mask.weigh(moments)
        if mask.rescale == "sparsity" or "rescale" in hparams:
            wanted = None if mask.rescale == "sparsity" else hparams["rescale"]
            gradient = rescale_tensors(gradient, weights, [slot.numel for slot in self.network.slots], wanted)
        return gradient, {}, self.metrics_of(weights, moments)

    def metrics_of(self, weights: Tensor, moments: TensorMoments) -> Metrics:
        """Diagnostics of a mask [P]."""
        metrics = {"mask_density": weights.mean()}
        if self.problem.diagnostics:
            metrics[DIAGNOSTICS] = mask_diagnostics(weights, moments, self.network.slots)
        return metrics


class LogMaskedAlgorithm(MaskedAlgorithm):
    """A `MaskedAlgorithm` whose mask needs sums of log-magnitudes: that of a `GeometricMean`."""

    sums_logs = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if problem.dtype == torch.float16:
            raise MaskError(
                "float16 supports only masks without log-magnitudes, because gradients are scaled. Use bf16 or tf32."
            )

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update. A step of its own is taken as it is written, with gradients from `problem.differentiate`."""
        return super().step(state, batch, hparams, key)


def diagnostic_names(slots: Sequence[Slot]) -> list[str]:
    """Return the names of the entries that `mask_diagnostics` computes.

    For every tensor, and for `all` tensors together:

    - `mask_density/<tensor>`: the mean of the mask;
    - `dead_fraction/<tensor>`: the share of elements whose mask is exactly 0;
    - `agreement/<tensor>/<bin>`: the share of elements whose A = |mean_e sign(g_e)| is in that tenth of 0..1.

    :param slots: places of the tensors in the flat vector.
    """

    def of(tensor: str) -> Iterator[str]:
        yield from (f"mask_density/{tensor}", f"dead_fraction/{tensor}")
        yield from (f"agreement/{tensor}/{number}" for number in range(BINS))

    return [name for tensor in (*(slot.name for slot in slots), "all") for name in of(tensor)]


def mask_diagnostics(weights: Tensor, moments: TensorMoments, slots: Sequence[Slot]) -> Tensor:
    """Compute diagnostics of a mask as one vector; see `diagnostic_names`.

    Works under `vmap` and never waits for the device.

    :param weights: flat mask `[P]`.
    :param moments: moments that the mask was computed from.
    :param slots: places of the tensors in the flat vector.
    """
    sizes = [slot.numel for slot in slots]
    pieces = zip(torch.split(weights, sizes), torch.split(moments.sign_sum, sizes), strict=True)
    sums = [_sums(mask, signs, moments.count) for mask, signs in pieces]
    total = torch.stack(sums).sum(0)
    return torch.cat([each / numel for each, numel in zip([*sums, total], [*sizes, sum(sizes)], strict=True)])


def _sums(mask: Tensor, sign_sum: Tensor, count: int) -> Tensor:
    own = torch.stack([mask.sum(), (mask == 0).sum(dtype=mask.dtype)])
    return torch.cat([own, agreement_counts(sign_sum, count, BINS).to(mask.dtype)])
