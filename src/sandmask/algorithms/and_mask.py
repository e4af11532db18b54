"""AND-mask, a variant that averages signs over steps, and the geometric mean (Parascandolo et al., ICLR 2021)."""

from dataclasses import replace

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams, Metrics, State
from sandmask.algorithms._rules import LogMaskedAlgorithm, MaskedAlgorithm
from sandmask.hparams import BELOW_ONE, FRACTION, Bounds, Choice, Constant, Hparam, Uniform
from sandmask.masks import ANDMask, GeometricMean, Mask, Rescale, TensorMoments

TAU = (
    Hparam("tau", 1.0, Uniform(0, 1), FRACTION),
    Hparam("tau", 1.0, Uniform(0.5, 1), FRACTION, space="domainbed"),
    Hparam("tau", 0.9, Uniform(0.9, 1), FRACTION, space="recipe"),
)
# 1 divides the update by the mask's density, as in the recipe. With 0, the update is that of the paper.
RESCALE = Hparam("rescale", 1, Constant(1), Bounds(low=0, high=1), space="recipe")
PAPER = "Parascandolo et al., Learning explanations that are hard to vary, ICLR 2021"


class ANDMaskAlgorithm(MaskedAlgorithm):
    """Update by m * mean_e(g_e), where m = 1[|mean_e sign(g_e)| >= tau].

    With `rescale`, the update of each tensor is divided by the mean of m.
    """

    rescale: Rescale = "none"

    def mask(self, hparams: Hparams) -> Mask:
        """Return the AND-mask with this run's threshold."""
        return ANDMask(tau=hparams["tau"], rescale=self.rescale)


class RescaledANDMaskAlgorithm(ANDMaskAlgorithm):
    """The AND-mask, with the update of each tensor divided by the mask's density, as in ILC's and DomainBed's code."""

    rescale = "sparsity"


class TemporalANDMask(ANDMaskAlgorithm):
    """Update by m * mean_e(g_e), where m = 1[|a| >= tau] and a is an average of the signs over steps.

    a is the moving average a <- b a + (1 - b) mean_e sign(g_e), which starts at 0 and is corrected by 1 / (1 - b^t). b
    is `sign_memory`; with b = 0, this is the AND-mask. With `rescale`, the update of each tensor is divided by the mean
    of m.

    The paper describes a "temporal AND-mask Adam" (its algorithm 1) for many environments that do not fit into one
    minibatch, and its code was not released. This is our own rule, which follows the idea but not the algorithm:
    averaging the signs of all environments, the correction, masking the gradient before Adam, and the values of b are
    ours.
    """

    training_only = ("signs", "signs_weight")

    def extra_state(self, seed: int) -> State:
        """The moving sums of the signs and of their weights."""
        return {"signs": torch.zeros(self.network.numel), "signs_weight": torch.zeros(())}

    def masked(self, state: State, moments: TensorMoments, hparams: Hparams) -> tuple[Tensor, State, Metrics]:
        """The AND-mask of the averaged signs."""
        memory = hparams["sign_memory"]
        signs = memory * state["signs"] + (1.0 - memory) * (moments.sign_sum / moments.count)
        weight = memory * state["signs_weight"] + (1.0 - memory)  # 1 - b^t, rounded like the sums of equal signs
        averaged = replace(moments, sign_sum=signs / weight * moments.count)
        gradient, _, metrics = super().masked(state, averaged, hparams)
        return gradient, {"signs": signs, "signs_weight": weight}, metrics


class GeometricMeanAlgorithm(LogMaskedAlgorithm):
    """Update by sign(mean_e g_e) exp(mean_e log |g_e|) where |mean_e sign(g_e)| >= tau, and by 0 elsewhere."""

    def mask(self, hparams: Hparams) -> Mask:
        """Return the mask of the geometric mean, with this run's threshold."""
        return GeometricMean(tau=hparams["tau"])


ALGORITHMS.register(
    AlgorithmEntry(
        name="ANDMask",
        summary="Update only the elements on whose gradient sign enough environments agree",
        paper=PAPER,
        build=ANDMaskAlgorithm,
        hparams=(*TAU, RESCALE),
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="ANDMask-rescaled",
        summary="AND-mask, divided by the mask's density as ILC's and DomainBed's code do",
        paper=PAPER,
        build=RescaledANDMaskAlgorithm,
        hparams=TAU,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="ANDMask-temporal",
        summary="AND-mask whose agreement is also averaged over steps",
        paper=f"a variant of ours; {PAPER}",
        build=TemporalANDMask,
        compares_environments=False,
        hparams=(*TAU, RESCALE, Hparam("sign_memory", 0.9, Choice(0.5, 0.9, 0.99), BELOW_ONE)),
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="GeometricMean",
        summary="Update by the geometric mean of the environments' gradients where enough of them agree",
        paper=PAPER,
        build=GeometricMeanAlgorithm,
        hparams=(*TAU, RESCALE),
    )
)
