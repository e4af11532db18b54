"""SAND-mask (Shahtalebi et al., 2021): the paper's equations 2 and 3, and the released code's variant."""

from collections.abc import Mapping

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams
from sandmask.algorithms._rules import MaskedAlgorithm
from sandmask.algorithms.and_mask import RESCALE
from sandmask.hparams import FRACTION, POSITIVE, Hparam, LogUniform, Uniform
from sandmask.masks import Mask, Rescale, SANDMask

TAU = (Hparam("tau", 1.0, Uniform(0, 1), FRACTION), Hparam("tau", 0.9, Uniform(0.9, 1), FRACTION, space="recipe"))
GAIN = Hparam("k", 10.0, LogUniform(10, -3, 5), POSITIVE)
PAPER = "Shahtalebi et al., SAND-mask: an enhanced gradient masking strategy, 2021"


def caution(hparams: Mapping[str, float]) -> str | None:
    """Return a warning for tau = 1, the default in the paper's table, which masks everything; None otherwise."""
    if hparams["tau"] < 1:
        return None
    return (
        "SAND-mask with tau = 1, the default of the paper's table, is zero everywhere: nothing will train. "
        "Set a lower one, such as --hparam tau=0.9, or use --space recipe."
    )


class SANDMaskAlgorithm(MaskedAlgorithm):
    """Update by m * mean_e(g_e), where m = max(0, tanh((A - tau) / s2)).

    A = |mean_e sign(g_e)| and s2 = var_e(g_e) / mean_e(g_e)^2. With `rescale`, the update of each tensor is divided by
    the mean of m.
    """

    rescale: Rescale = "none"

    def mask(self, hparams: Hparams) -> Mask:
        """Return the mask of equations 2 and 3."""
        return SANDMask(tau=hparams["tau"], rescale=self.rescale)


class RescaledSANDMaskAlgorithm(SANDMaskAlgorithm):
    """The SAND-mask, with the update of each tensor divided by the mask's density."""

    rescale = "sparsity"


class ReleasedSANDMaskAlgorithm(MaskedAlgorithm):
    """The released code: m = max(0, tanh(k (A - tau) / var_e(g_e))), and updates are divided by the mask's density."""

    def mask(self, hparams: Hparams) -> Mask:
        """Return the mask of the released code."""
        return SANDMask(hparams["tau"], rescale="sparsity", dispersion="absolute", gain=hparams["k"])


ALGORITHMS.register(
    AlgorithmEntry(
        name="SANDMask",
        summary="Weight every element by the agreement of its gradients in sign and size (as printed)",
        paper=PAPER,
        build=SANDMaskAlgorithm,
        hparams=(*TAU, RESCALE),
        caution=caution,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="SANDMask-rescaled",
        summary="SAND-mask as printed, divided by the mask's density",
        paper=PAPER,
        build=RescaledSANDMaskAlgorithm,
        hparams=TAU,
        caution=caution,
    )
)
ALGORITHMS.register(
    AlgorithmEntry(
        name="SANDMask-released",
        summary="SAND-mask as the authors released it: absolute dispersion, a gain k, rescaled",
        paper=PAPER,
        build=ReleasedSANDMaskAlgorithm,
        hparams=(*TAU, GAIN),
        caution=caution,
    )
)
