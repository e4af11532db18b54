"""Gradient masks over environments, and the running moments from which masks are computed.

A mask called on the gradients `[E, *shape]` of E environments returns the masked mean gradient:

>>> import torch
>>> from sandmask.masks import ANDMask, GradientMoments
>>> gradients = torch.tensor([[1.0, 2.0], [3.0, -2.0], [2.0, 1.0]])
>>> mask = ANDMask(tau=1.0)
>>> mask(gradients)
tensor([2., 0.])

Gradients need not be in memory at the same time. Moments accumulate them, and need the memory of a few gradients:

>>> moments = mask.new_moments()
>>> for gradient in gradients:
...     _ = moments.update(gradient)
>>> mask.from_moments(moments)
tensor([2., 0.])
"""

from sandmask.masks._and import AgrRand, AgrSum, ANDMask, GeometricMean
from sandmask.masks._base import Mask, Rescale
from sandmask.masks._errors import MaskError, MaskWarning
from sandmask.masks._functional import (
    TensorMoments,
    absolute_sand_weights,
    agreement,
    agreement_counts,
    and_weights,
    geometric_mean,
    rescale_by_sparsity,
    sand_weights,
)
from sandmask.masks._gpu import moments_of_parts
from sandmask.masks._layout import Gradients
from sandmask.masks._moments import GradientMoments
from sandmask.masks._sand import SANDMask
from sandmask.masks._two_pass import fold_runs, gradient_moments

__all__ = [
    "ANDMask",
    "AgrRand",
    "AgrSum",
    "GeometricMean",
    "GradientMoments",
    "Gradients",
    "Mask",
    "MaskError",
    "MaskWarning",
    "Rescale",
    "SANDMask",
    "TensorMoments",
    "absolute_sand_weights",
    "agreement",
    "agreement_counts",
    "and_weights",
    "fold_runs",
    "geometric_mean",
    "gradient_moments",
    "moments_of_parts",
    "rescale_by_sparsity",
    "sand_weights",
]
