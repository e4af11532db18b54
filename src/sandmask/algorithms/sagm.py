"""Sharpness-aware gradient matching (Wang et al., CVPR 2023)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams
from sandmask.algorithms._sharpness import RHO, SharpnessAware
from sandmask.hparams import NON_NEGATIVE, Choice, Hparam


class SAGM(SharpnessAware):
    """Update by (g + g_p) / 2, where g = grad R(w), g_p = grad R(w + (rho / |g| - alpha) g) and R = mean_e R_e.

    The step back by alpha g makes the gradients at both points match, to first order.
    """

    def reach(self, norm: Tensor, hparams: Hparams) -> Tensor:
        """rho / |g| - alpha."""
        return super().reach(norm, hparams) - hparams["alpha"]

    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """The mean of both."""
        return 0.5 * (here + there)


ALPHA = Choice(5e-4, 1e-3)

ALGORITHMS.register(
    AlgorithmEntry(
        name="SAGM",
        summary="Lower the loss here and at the worst point nearby, and match their gradients",
        paper="Wang et al., Sharpness-aware gradient matching for domain generalization, CVPR 2023",
        build=SAGM,
        compares_environments=False,
        hparams=(
            RHO,
            Hparam("alpha", 1e-3, ALPHA, NON_NEGATIVE),
            Hparam("alpha", 5e-4, ALPHA, NON_NEGATIVE, dataset="OfficeHome"),
            Hparam("alpha", 5e-4, ALPHA, NON_NEGATIVE, dataset="DomainNet"),
        ),
    )
)
