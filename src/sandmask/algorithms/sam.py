"""Sharpness-aware methods: SAM, GSAM and SAGM."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams
from sandmask.algorithms._rules import SharpnessAware
from sandmask.hparams import NON_NEGATIVE, Choice, Hparam, LogUniform

RHO = Hparam("rho", 0.05, Choice(0.01, 0.02, 0.05, 0.1), NON_NEGATIVE)
_SAGM_ALPHA = Choice(5e-4, 1e-3)
_EPSILON = 1e-12


class SAM(SharpnessAware):
    """Update by g_p = grad R(w + rho g / |g|), where g = grad R(w) and R = mean_e R_e."""

    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """Return g_p."""
        return there


class GSAM(SharpnessAware):
    """Update by g_p - alpha g_perp, where g_p is SAM's gradient and g_perp the part of g = grad R(w) orthogonal to it.

    g_perp = g - (g . g_p / |g_p|^2) g_p. To first order, subtracting alpha g_perp lowers the gap R(w + eps) - R(w) and
    does not change R(w + eps), where eps = rho g / |g|. The default of alpha is that of published code for domain
    generalization; its range is ours.
    """

    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """Return g_p - alpha g_perp."""
        across = here - (here * there).sum() / (there.square().sum() + _EPSILON) * there
        return there - hparams["alpha"] * across


class SAGM(SharpnessAware):
    """Update by (g + g_p) / 2, where g = grad R(w), g_p = grad R(w + (rho / |g| - alpha) g) and R = mean_e R_e.

    To first order, the step back by alpha g favours points at which both gradients match.
    """

    def reach(self, norm: Tensor, hparams: Hparams) -> Tensor:
        """Return rho / |g| - alpha."""
        return super().reach(norm, hparams) - hparams["alpha"]

    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """Return the mean of both gradients."""
        return 0.5 * (here + there)


ALGORITHMS.register(
    AlgorithmEntry(
        name="SAM",
        summary="Minimize the loss at the worst point nearby, which favours flat minima",
        paper="Foret et al., Sharpness-aware minimization for efficiently improving generalization, ICLR 2021",
        build=SAM,
        compares_environments=False,
        hparams=(RHO,),
    )
)
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
ALGORITHMS.register(
    AlgorithmEntry(
        name="SAGM",
        summary="Lower the loss here and at the worst point nearby, and match their gradients",
        paper="Wang et al., Sharpness-aware gradient matching for domain generalization, CVPR 2023",
        build=SAGM,
        compares_environments=False,
        hparams=(
            RHO,
            Hparam("alpha", 1e-3, _SAGM_ALPHA, NON_NEGATIVE),
            Hparam("alpha", 5e-4, _SAGM_ALPHA, NON_NEGATIVE, dataset="OfficeHome"),
            Hparam("alpha", 5e-4, _SAGM_ALPHA, NON_NEGATIVE, dataset="DomainNet"),
        ),
    )
)
