"""Gradient surgery by agreement of signs (Mansilla et al., ICCV 2021)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State, descend
from sandmask.algorithms._rules import MaskedAlgorithm
from sandmask.functional import EnvBatch, random
from sandmask.functional.differentiate import moments_of
from sandmask.masks import AgrSum, Mask, TensorMoments

PAPER = "Mansilla et al., Domain generalization via gradient surgery, ICCV 2021"


class AgrSumAlgorithm(MaskedAlgorithm):
    """Update by sum_e g_e where the gradients of all environments have the same sign, and by 0 elsewhere.

    This is E times the update of the AND-mask with tau = 1. With Adam, only the share of the weight decay differs.
    """

    def mask(self, hparams: Hparams) -> Mask:
        """Return the mask, which has no parameters."""
        return AgrSum()


class AgrRandAlgorithm(AgrSumAlgorithm):
    """Update by u = sum_e g_e where all signs are equal, and by normal noise elsewhere.

    The standard deviation of the noise is the mean of |u| over the elements whose signs are equal.
    """

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        moments, risks = self.problem.differentiate.environment_moments(self.risks_by(hparams), state["params"], batch)
        gradient, metrics = self._filled(moments, hparams, key)
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": risks.mean(), **metrics}

    def direction(
        self, state: State, gradients: Tensor, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """Return the update's gradient, no changes of the state, and metrics, from environments' gradients [E, P]."""
        gradient, metrics = self._filled(moments_of(gradients), hparams, key)
        return gradient, {}, metrics

    def _filled(self, moments: TensorMoments, hparams: Hparams, key: Tensor) -> tuple[Tensor, Metrics]:
        weights, agreed = self.mask(hparams).weigh(moments)
        size = agreed.abs().sum() / weights.sum().clamp_min(1.0)
        gradient = torch.where(weights > 0, agreed, size * random.normal(key, agreed.shape[-1]))
        return gradient, self.metrics_of(weights, moments)


ALGORITHMS.register(
    AlgorithmEntry(
        name="AgrSum",
        summary="Update by the sum of the gradients where all environments agree on the sign",
        paper=PAPER,
        build=AgrSumAlgorithm,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="AgrRand",
        summary="AgrSum, with random steps where environments disagree",
        paper=PAPER,
        build=AgrRandAlgorithm,
    )
)
