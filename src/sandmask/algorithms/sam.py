"""Sharpness-aware minimization (Foret et al., ICLR 2021)."""

from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry, Hparams
from sandmask.algorithms._sharpness import RHO, SharpnessAware


class SAM(SharpnessAware):
    """Update by g_p = grad R(w + rho g / |g|), where g = grad R(w) and R = mean_e R_e."""

    def combine(self, here: Tensor, there: Tensor, hparams: Hparams) -> Tensor:
        """g_p."""
        return there


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
