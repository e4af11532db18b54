"""Gradients that several processes take together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sandmask.functional.batch import EnvBatch
from sandmask.functional.differentiate import Autograd, Differentiator, EnvironmentLosses, Objective
from sandmask.functional.dividing import dividing
from sandmask.functional.ranks import Ranks
from sandmask.gradients._processes import reduce_sums
from sandmask.masks import TensorMoments, gradient_moments
from sandmask.masks._welford import Sums, fold_sums

Own = Callable[[EnvBatch], tuple[TensorMoments, Tensor]]


class AcrossProcesses:
    """The same numbers, to rounding, in every process, each of which computes a part.

    Of environments, each process takes as many as any other, and all divide the examples of the rest. The gradient of
    an objective is taken with the network's passes divided by examples: see `divided`.
    """

    def __init__(self, ranks: Ranks, inner: Differentiator) -> None:
        self.ranks, self.inner = ranks, inner
        self._plain = Autograd()

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        part, value, aux = self._part(objective, vector)
        return self.ranks.sum(part).div_(self.ranks.size), value, aux

    def environment_moments(
        self,
        losses: EnvironmentLosses,
        vector: Tensor,
        batch: EnvBatch,
        *,
        log_magnitude: bool = False,
        of_own: Own | None = None,
    ) -> tuple[TensorMoments, Tensor]:
        """See `Differentiator.environment_moments`. `of_own` computes those of this process's environments."""
        own, rest = self.ranks.environments(batch.n_envs)
        values = vector.new_zeros(batch.n_envs)
        count = len(own) * self.ranks.size
        sums: Sums | None = None
        if own:
            part = batch.part(own)
            moments, values[own.start : own.stop] = (
                of_own(part)
                if of_own is not None
                else self.inner.environment_moments(losses, vector, part, log_magnitude=log_magnitude)
            )
            sums = _sums(moments)
            reduce_sums(sums, len(own), count, self.ranks.sum)
        if rest:
            gradients, values[rest.start :] = self._divided(losses, vector.expand(len(rest), -1), batch.part(rest))
            more = _sums(gradient_moments(self.ranks.sum(gradients), log=log_magnitude))
            if sums is None:
                sums = more
            else:
                fold_sums(sums, count, more, len(rest))
        assert sums is not None
        return _moments(batch.n_envs, sums), self.ranks.sum(values)

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """See `Differentiator.environment_gradients`."""
        own, rest = self.ranks.environments(batch.n_envs)
        gradients, values = torch.zeros_like(vectors), vectors.new_zeros(batch.n_envs)
        for envs, take in ((own, self.inner.environment_gradients), (rest, self._divided)):
            if envs:
                some = slice(envs.start, envs.stop)
                gradients[some], values[some] = take(losses, vectors[some], batch.part(envs))
        return self.ranks.sum(gradients), self.ranks.sum(values)

    def _part(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """A gradient whose mean over processes is the gradient."""
        with dividing(self.ranks):
            return self._plain.gradient(objective, vector)

    def _divided(self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch) -> tuple[Tensor, Tensor]:
        """Gradients and losses whose sums over processes are those of the environments, which all divide."""
        gradients, values = [], []
        for e in range(batch.n_envs):
            gradient, value, _ = self._part(_loss(losses, batch.environment(e)), vectors[e])
            gradients.append(gradient)
            values.append(value)
        return torch.stack(gradients) / self.ranks.size, torch.stack(values) / self.ranks.size


def _loss(losses: EnvironmentLosses, batch: EnvBatch) -> Objective:
    return lambda vector: (losses(vector, batch)[0], ())


def _sums(moments: TensorMoments) -> Sums:
    logs = None if moments.log_sum is None else [moments.log_sum]
    return Sums([moments.sign_sum], [moments.mean], [moments.m2], logs)


def _moments(count: int, sums: Sums) -> TensorMoments:
    logs = None if sums.log_sum is None else sums.log_sum[0]
    return TensorMoments(count, sums.sign_sum[0], sums.mean[0], sums.m2[0], logs)
