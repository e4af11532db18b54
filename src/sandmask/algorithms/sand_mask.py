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
    """Warn about tau = 1, the default of the paper's table: no agreement exceeds 1, so everything is masked."""
    if hparams["tau"] < 1:
        return None
    return (
        "SAND-mask with tau = 1, the default of the paper's table, is zero everywhere: nothing will train. "
        "Set a lower one, such as --hparam tau=0.9, or use --space recipe."
    )


class SANDMaskAlgorithm(MaskedAlgorithm):
    """m = max(0, tanh((A - tau) / s2)), A = |mean_e sign(g_e)|, s2 = var_e(g_e) / mean_e(g_e)^2."""

    rescale: Rescale = "none"

    def mask(self, hparams: Hparams) -> Mask:
        """The mask of equations 2 and 3."""
        return SANDMask(tau=hparams["tau"], rescale=self.rescale)


class RescaledSANDMaskAlgorithm(SANDMaskAlgorithm):
    """The SAND-mask, divided by the mask's density tensor by tensor."""

    rescale = "sparsity"


class ReleasedSANDMaskAlgorithm(MaskedAlgorithm):
    """m = max(0, tanh(k (A - tau) / var_e(g_e))), divided by the mask's density: the released code."""

    def mask(self, hparams: Hparams) -> Mask:
        """The mask of the released code."""
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
