"""AND-mask (Parascandolo et al., Learning explanations that are hard to vary, ICLR 2021)."""

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams
from sandmask.algorithms._masked import MaskedAlgorithm
from sandmask.hparams import FRACTION, Bounds, Constant, Hparam, Uniform
from sandmask.masks import ANDMask, Mask

TAU = (
    Hparam("tau", 1.0, Uniform(0, 1), FRACTION),
    Hparam("tau", 1.0, Uniform(0.5, 1), FRACTION, space="domainbed"),
    Hparam("tau", 0.9, Uniform(0.9, 1), FRACTION, space="recipe"),
)
# The recipe divides by the mask's density; with 0 the update is the printed one.
RESCALE = Hparam("rescale", 1, Constant(1), Bounds(low=0, high=1), space="recipe")
PAPER = "Parascandolo et al., Learning explanations that are hard to vary, ICLR 2021"


class ANDMaskAlgorithm(MaskedAlgorithm):
    """m = 1[|mean_e sign(g_e)| >= tau]; the update is m * mean_e(g_e), with `rescale` divided by the mean of m."""

    def mask(self, hparams: Hparams) -> Mask:
        """The mask of eq. 1's condition."""
        return ANDMask(tau=hparams["tau"])


class RescaledANDMaskAlgorithm(MaskedAlgorithm):
    """The same, divided by the mask's density tensor by tensor, as in ILC's and DomainBed's code."""

    def mask(self, hparams: Hparams) -> Mask:
        """The same mask."""
        return ANDMask(tau=hparams["tau"], rescale="sparsity")


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
