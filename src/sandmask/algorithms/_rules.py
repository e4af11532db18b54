"""Base classes of methods that change gradients: sharpness-aware methods, and rules for environments' gradients.

A rule computes the update from the gradients of all environments. It is a mask, which works element by element, or it
combines whole gradients. See `_composed` for compositions.
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

DIAGNOSTICS = "diagnostics"  # the metric that is a vector; `diagnostic_names` names its entries
BINS = 10
_EPSILON = 1e-12


class SharpnessAware(Algorithm):
    """Base class of sharpness-aware methods, which combine the gradient with the gradient at a point uphill.

    The gradients are g = grad R(w) and g_p = grad R(w + reach * g), where R = mean_e R_e. Both use the same minibatch
    and the same dropout. A step costs as much as two steps of ERM.
    """

    reads: Reads = "examples"

    def reach(self, norm: Tensor, hparams: Hparams) -> Tensor:
        """Return the factor of the gradient in the step uphill. Here, it is rho / |g|, for a step of length rho."""
        return hparams["rho"] / (norm + _EPSILON)

    @abstractmethod
    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """Return the update's gradient from g (`here`) and g_p (`there`)."""

    def aware(self, here: Tensor, params: Tensor, gradient_at: Callable[[Tensor], Tensor], hparams: Hparams) -> Tensor:
        """Return the update's gradient. `here` is the gradient at `params`; `gradient_at` computes it elsewhere."""
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
    """Base class of methods that combine the gradients of all environments, which are in memory at the same time."""

    reads: Reads = "environments"

    @abstractmethod
    def combine(self, gradients: Tensor, hparams: Hparams, key: Tensor) -> Tensor:
        """Return the update's gradient [P] from the environments' gradients [E, P]."""

    def direction(
        self, state: State, gradients: Tensor, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """Return the update's gradient, changes of the state and metrics. The last two are empty here."""
        return self.combine(gradients, hparams, key), {}, {}

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        vectors, risks = state["params"].expand(batch.n_envs, -1), self.risks_by(hparams)
        gradients, values = self.problem.differentiate.environment_gradients(risks, vectors, batch)
        gradient = self.combine(gradients, hparams, key)
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": values.mean()}


class MaskedAlgorithm(Algorithm):
    """Base class of methods that mask the mean of the environments' gradients, element by element.

    If a run has the hyperparameter `rescale` and it is 1, the update of each tensor is divided by the mask's density.

    A mask that needs sums of log-magnitudes requires a `LogMaskedAlgorithm`, because the fast ways to compute moments
    do not compute these sums.
    """

    reads: Reads = "environments"
    sums_logs = False

    @property
    def through_logits(self) -> bool:
        """Whether all gradients pass through the logits, where they can be scaled. False with losses of one's own."""
        kind = type(self)
        own = kind.risks is Algorithm.risks and kind.logits is Algorithm.logits
        return own and kind.terms is MaskedAlgorithm.terms

    @abstractmethod
    def mask(self, hparams: Hparams) -> Mask:
        """Return the mask for these hyperparameters."""

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        moments, risks = self.problem.differentiate.environment_moments(
            self.risks_by(hparams), state["params"], batch, log_magnitude=self.sums_logs
        )
        return self.update(state, moments, risks, hparams)

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """Complete a step, given the moments of the gradients."""
        gradient, changes, metrics = self.masked(state, moments, hparams)
        stepped = {**state, **changes, **descend(state, gradient, state["adam"], hparams)}
        return stepped, {"loss": risks.mean(), **metrics}

    def terms(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """Return values, and changes of the state. The examples of e contribute g_e to the gradient of their sum."""
        return self.risks(params, batch, hparams), {}

    def finish(
        self, state: State, moments: TensorMoments, values: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        """Complete a step, given the moments of the gradients and the results of `terms`."""
        return self.update(state, moments, values, hparams)

    def direction(
        self, state: State, gradients: Tensor, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """Return the results of `masked` for the environments' gradients [E, P]."""
        return self.masked(state, moments_of(gradients, log_magnitude=self.sums_logs), hparams)

    def masked(self, state: State, moments: TensorMoments, hparams: Hparams) -> tuple[Tensor, State, Metrics]:
        """Return the update's gradient, changes of the state and metrics, from moments over environments."""
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
        """Return the metrics of a mask [P]."""
        metrics = {"mask_density": weights.mean()}
        if self.problem.diagnostics:
            metrics[DIAGNOSTICS] = mask_diagnostics(weights, moments, self.network.slots)
        return metrics


class LogMaskedAlgorithm(MaskedAlgorithm):
    """A `MaskedAlgorithm` whose mask needs sums of log-magnitudes, as `GeometricMean` does."""

    sums_logs = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if problem.dtype == torch.float16:
            raise MaskError(
                "float16 supports only masks without log-magnitudes, because gradients are scaled. Use bf16 or tf32."
            )

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update. Because this class has its own `step`, the fast ways to compute moments are not used."""
        return super().step(state, batch, hparams, key)


def diagnostic_names(slots: Sequence[Slot]) -> list[str]:
    """Return the names of the entries that `mask_diagnostics` computes.

    For every tensor, and for `all` tensors together:

    - `mask_density/<tensor>`: the mean of the mask;
    - `dead_fraction/<tensor>`: the share of elements whose mask is exactly 0;
    - `agreement/<tensor>/<bin>`: the share of elements whose A = |mean_e sign(g_e)| is in that tenth of 0..1.

    :param slots: positions of the tensors in the flat vector.
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
    :param slots: positions of the tensors in the flat vector.
    """
    sizes = [slot.numel for slot in slots]
    pieces = zip(torch.split(weights, sizes), torch.split(moments.sign_sum, sizes), strict=True)
    sums = [_sums(mask, signs, moments.count) for mask, signs in pieces]
    total = torch.stack(sums).sum(0)
    return torch.cat([each / numel for each, numel in zip([*sums, total], [*sizes, sum(sizes)], strict=True)])


def _sums(mask: Tensor, sign_sum: Tensor, count: int) -> Tensor:
    own = torch.stack([mask.sum(), (mask == 0).sum(dtype=mask.dtype)])
    return torch.cat([own, agreement_counts(sign_sum, count, BINS).to(mask.dtype)])
