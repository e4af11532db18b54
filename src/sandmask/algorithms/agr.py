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
    """u = sum_e g_e where all environments' gradients have one sign, and 0 elsewhere.

    It is E times the AND-mask with tau = 1: with Adam, all that differs is the share of the weight decay.
    """

    def mask(self, hparams: Hparams) -> Mask:
        """The mask, which has no parameters."""
        return AgrSum()


class AgrRandAlgorithm(AgrSumAlgorithm):
    """u = sum_e g_e where all signs are equal; elsewhere u ~ N(0, s^2), s the mean |u| over what agrees."""

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        moments, risks = self.problem.differentiate.environment_moments(self.risks_by(hparams), state["params"], batch)
        gradient, metrics = self._filled(moments, hparams, key)
        return {**state, **descend(state, gradient, state["adam"], hparams)}, {"loss": risks.mean(), **metrics}

    def direction(
        self, state: State, gradients: Tensor, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """The update's gradient, of the environments' [E, P]; nothing changes in the state; metrics of the mask."""
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
