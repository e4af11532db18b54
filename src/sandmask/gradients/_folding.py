"""Fold a model's gradients into moments, one parameter after the other, while they are still in the CPU's cache."""

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from sandmask.gradients._tape import UnsupportedError
from sandmask.masks import TensorMoments, fold_runs, gradient_moments
from sandmask.masks._finite import all_finite
from sandmask.masks._two_pass import PIECE, accumulation_dtype, works_in_place

# The largest number of elements of a small gradient, and of all small gradients together. For small gradients, calls
# take longer than arithmetic.
_SMALL, _SMALL_TOGETHER = 2**17, 2**20


class Folding:
    """The moments of all parameters in contiguous memory, so that a mask reads them as one tensor.

    Small gradients come last. They are copied into one buffer and folded together at the end.

    :param params: parameters by name.
    :param n_envs: number of environments.
    """

    def __init__(self, params: Mapping[str, Tensor], n_envs: int) -> None:
        self._n_envs, self._n_params = n_envs, len(params)
        sizes = {name: param.numel() for name, param in params.items()}
        total = sum(sizes.values())
        self._places: dict[str, slice] = {}
        self._first_small = begin = 0
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            self._places[name] = slice(begin, begin + sizes[name])
            if n_envs * sizes[name] > _SMALL or n_envs * (total - begin) > _SMALL_TOGETHER:
                self._first_small = begin + sizes[name]
            begin += sizes[name]
        n_small = math.ceil((total - self._first_small) / PIECE) * PIECE  # threads divide whole pieces
        dtype = accumulation_dtype(next(iter(params.values())).dtype)
        self._small = torch.zeros(n_envs, n_small, dtype=dtype)
        self._moments = torch.empty(3, self._first_small + n_small, dtype=dtype)
        self._shapes: dict[str, torch.Size] = {}  # of the parameters in `_moments`
        self._apart: dict[str, TensorMoments] = {}  # of parameters that do not fit into `_moments`

    def add(self, name: str, gradients: Tensor) -> None:
        """Fold the gradients `[E, *shape]` of a parameter."""
        if name in self._shapes or name in self._apart:
            raise UnsupportedError("a parameter is used twice")
        dtype, place = self._moments.dtype, self._places[name]
        if not works_in_place(gradients) or accumulation_dtype(gradients.dtype) != dtype:
            self._apart[name] = gradient_moments(gradients)
            return
        self._shapes[name] = gradients.shape[1:]
        rows = gradients.reshape(self._n_envs, -1)
        if place.start < self._first_small:
            fold_runs(rows[None].to(dtype), self._moments[:, None, place])
        else:
            self._small[:, place.start - self._first_small : place.stop - self._first_small] = rows

    @cached_property
    def moments(self) -> dict[str, TensorMoments]:
        """The moments by name, of the parameters that have gradients. Read it after all gradients are added."""
        fold_runs(self._small[None], self._moments[:, None, self._first_small :])
        found = {
            name: TensorMoments(self._n_envs, *self._moments[:, self._places[name]].view(3, *shape))
            for name, shape in self._shapes.items()
        }
        return {**found, **self._apart}

    def all_finite(self) -> bool:
        """Whether all means are finite. One sum is enough to tell, unless it overflows."""
        means = [moments.mean for moments in self.moments.values()]
        one_buffer = len(self._shapes) == self._n_params
        return (one_buffer and math.isfinite(self._moments[1].sum())) or all(all_finite(means))
