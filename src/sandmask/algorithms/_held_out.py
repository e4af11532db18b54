"""Diagnostics of the environments' gradients on held-out examples."""

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm
from sandmask.algorithms._composed import Composed
from sandmask.algorithms._functions import Hparams, Metrics, State
from sandmask.algorithms._rules import MaskedAlgorithm
from sandmask.functional import EnvBatch
from sandmask.masks import Mask, TensorMoments, agreement


class HeldOutProbe(MaskedAlgorithm):
    """Computes diagnostics of the environments' gradients without changing the state.

    It is a masked method whose update does not change the state, so that moments are computed in the fastest way
    available. Dropout is off, so that the same state and batch always give the same result. The metrics are:

    - `held_out_loss`: mean_e R_e;
    - `held_out_agreement`: the mean of A = |mean_e sign(g_e)| over the elements with a gradient other than zero
      (elements of a dead unit would otherwise count as disagreement);
    - `held_out_coherence`: |mean_e g_e|^2 / mean_e |g_e|^2, the share of the gradients' power that environments have in
      common; its expectation is 1/E if they have nothing in common;
    - `held_out_mask_density`: the mean of the algorithm's own mask over all elements, if it has a mask.
    """

    def __init__(self, subject: Algorithm) -> None:
        self.problem = subject.problem
        self.network = subject.network
        rule = subject.rule if isinstance(subject, Composed) else subject
        self._masked = rule if isinstance(rule, MaskedAlgorithm) else None

    @classmethod
    def of(cls, subject: Algorithm) -> "HeldOutProbe | None":
        """Return the probe of an algorithm, or None if predictions need more than the network and the example."""
        return cls(subject) if subject.is_network else None

    def mask(self, hparams: Hparams) -> Mask:
        """Return the algorithm's own mask."""
        assert self._masked is not None
        return self._masked.mask(hparams)

    def dropout(self, batch: EnvBatch, hparams: Hparams) -> None:
        """Return None: no dropout, as in an evaluation."""

    def update(self, state: State, moments: TensorMoments, risks: Tensor, hparams: Hparams) -> tuple[State, Metrics]:
        """Return the unchanged state, and the metrics of the moments."""
        reached = ((moments.mean != 0) | (moments.m2 != 0)).to(moments.mean.dtype)
        agreed = agreement(moments.sign_sum, moments.count)
        common = moments.mean.square().sum()
        power = common + moments.m2.sum() / moments.count
        metrics = {
            "held_out_loss": risks.mean(),
            "held_out_agreement": agreed.sum() / reached.sum().clamp(min=1),
            "held_out_coherence": common / power.clamp(min=torch.finfo(power.dtype).tiny),
        }
        if self._masked is not None:
            mask = self.mask(hparams)
            # Without sums of log-magnitudes, the mask can be computed, but not the masked gradient.
            weights = mask.element_weights(moments) if mask.needs_log_magnitude else mask.weigh(moments)[0]
            metrics["held_out_mask_density"] = weights.mean()
        return state, metrics
