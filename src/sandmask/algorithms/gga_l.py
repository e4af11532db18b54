"""Gradient-guided annealing, as noise (Ballas and Diou, CVPR 2025)."""

import torch
from torch import Tensor

from sandmask.algorithms._base import ALGORITHMS, AlgorithmEntry
from sandmask.algorithms._functions import Hparams
from sandmask.algorithms._rules import CombinedGradients
from sandmask.functional import random
from sandmask.hparams import NON_NEGATIVE, Hparam, LogUniform

_SMALLEST = 1e-12


class GGAL(CombinedGradients):
    """Update by mean_e g_e + gamma (1 - sim) xi, where sim is the mean cosine between the environments' gradients.

    xi ~ U(0, 1) for each element, as in the paper; the released code draws from N(0, 1). The range of gamma is ours.
    """

    def combine(self, gradients: Tensor, hparams: Hparams, key: Tensor) -> Tensor:
        """Return the mean gradient plus noise, which is larger if the environments agree less."""
        noise = random.uniform(key, gradients.shape[-1])
        return gradients.mean(0) + hparams["gga_gamma"] * (1.0 - mean_cosine(gradients)) * noise


def mean_cosine(gradients: Tensor) -> Tensor:
    """Return the mean over pairs of the cosine between gradients [E, P]; 1 for a single environment."""
    n_envs = len(gradients)
    if n_envs == 1:
        return torch.ones_like(gradients[0, 0])
    units = gradients / torch.linalg.vector_norm(gradients, dim=-1, keepdim=True).clamp_min(_SMALLEST)
    cosines = units @ units.T
    off_diagonal: Tensor = cosines.sum() - cosines.diagonal().sum()
    return off_diagonal / (n_envs * (n_envs - 1))


ALGORITHMS.register(
    AlgorithmEntry(
        name="GGA_L",
        summary="Add noise to the gradient, more of it where the environments' gradients disagree",
        paper="Ballas and Diou, Gradient-guided annealing for domain generalization, CVPR 2025",
        build=GGAL,
        hparams=(Hparam("gga_gamma", 1e-3, LogUniform(10, -5, -2), NON_NEGATIVE),),
    )
)
