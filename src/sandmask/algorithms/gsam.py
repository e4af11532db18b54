"""Surrogate gap guided sharpness-aware minimization (Zhuang et al., ICLR 2022)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams
from sandmask.algorithms._sharpness import RHO, SharpnessAware
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform

_EPSILON = 1e-12


class GSAM(SharpnessAware):
    """Update by g_p - alpha g_perp, where g_p is SAM's gradient and g_perp the part of g = grad R(w) across it.

    g_perp = g - (g . g_p / |g_p|^2) g_p. Going against it lowers the gap R(w + eps) - R(w) and leaves R(w + eps) as it
    is, to first order. The default of alpha is that of published code for domain generalization; the draw is ours.
    """

    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """g_p - alpha g_perp."""
        across = here - (here * there).sum() / (there.square().sum() + _EPSILON) * there
        return there - hparams["alpha"] * across


ALGORITHMS.register(
    AlgorithmEntry(
        name="GSAM",
        summary="SAM, with a smaller gap between the loss here and at the worst point nearby",
        paper="Zhuang et al., Surrogate gap minimization improves sharpness-aware training, ICLR 2022",
        build=GSAM,
        compares_environments=False,
        hparams=(RHO, Hparam("alpha", 1e-3, LogUniform(10, -4, -0.5), NON_NEGATIVE)),
    )
)
