"""Gradients that several processes compute together, by dividing passes through a network.

In a divided pass, each process computes some of the rows, and every process receives all rows. The gradient of a
process is then only a part: the mean over processes equals the gradient of one process that computes all rows. This is
also true for parameters that are used outside of divided passes, because every process has their whole gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

from sandmask._physical import in_transform
from sandmask.errors import SandmaskError
from sandmask.functional.batch import EnvBatch
from sandmask.functional.differentiate import Autograd, Differentiator, EnvironmentLosses, Objective, Pull
from sandmask.functional.ranks import Ranks
from sandmask.gradients._processes import reduce_sums
from sandmask.masks import TensorMoments, gradient_moments
from sandmask.masks._welford import Sums, fold_sums

Own = Callable[[EnvBatch], tuple[TensorMoments, Tensor]]


class AcrossProcesses(Differentiator):
    """Divides the computation of gradients over processes. All processes get the same gradients, up to rounding.

    For gradients of environments, each process computes the same number of environments, and the processes divide the
    examples of the remaining ones. For the gradient of an objective, they divide the examples of each pass through the
    network: see `divided`.
    """

    def __init__(self, ranks: Ranks, inner: Differentiator) -> None:
        self.ranks, self.inner = ranks, inner
        self._divided = _Divided(ranks)

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        part, value, aux = self._divided.gradient(objective, vector)
        return self.ranks.sum(part).div_(self.ranks.size), value, aux

    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """See `Differentiator.pullback`."""
        value, pull = self._divided.pullback(function, vector)
        return value, lambda gradient: self.ranks.sum(pull(gradient)).div_(self.ranks.size)

    def environment_moments(
        self,
        losses: EnvironmentLosses,
        vector: Tensor,
        batch: EnvBatch,
        *,
        log_magnitude: bool = False,
        of_own: Own | None = None,
    ) -> tuple[TensorMoments, Tensor]:
        """See `Differentiator.environment_moments`. `of_own` computes the moments of this process's environments."""
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
            vectors = vector.expand(len(rest), -1)
            gradients, values[rest.start :] = self._divided.environment_gradients(losses, vectors, batch.part(rest))
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
        for envs, way in ((own, self.inner), (rest, self._divided)):
            if envs:
                some = slice(envs.start, envs.stop)
                gradients[some], values[some] = way.environment_gradients(losses, vectors[some], batch.part(envs))
        return self.ranks.sum(gradients), self.ranks.sum(values)


class _Divided(Autograd):
    """Computes a part of every pass. The mean of its gradients over processes is the gradient."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def gradient(self, objective: Objective, vector: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Differentiator.gradient`."""
        with dividing(self.ranks):
            return super().gradient(objective, vector)

    def pullback(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Pull]:
        """See `Differentiator.pullback`."""
        with dividing(self.ranks):
            return super().pullback(function, vector)

    def environment_gradients(
        self, losses: EnvironmentLosses, vectors: Tensor, batch: EnvBatch
    ) -> tuple[Tensor, Tensor]:
        """Gradients and losses of the environments, to be summed (not averaged) over processes."""
        gradients, values = super().environment_gradients(losses, vectors, batch)
        return gradients / self.ranks.size, values / self.ranks.size


def _sums(moments: TensorMoments) -> Sums:
    logs = None if moments.log_sum is None else [moments.log_sum]
    return Sums([moments.sign_sum], [moments.mean], [moments.m2], logs)


def _moments(count: int, sums: Sums) -> TensorMoments:
    logs = None if sums.log_sum is None else sums.log_sum[0]
    return TensorMoments(count, sums.sign_sum[0], sums.mean[0], sums.m2[0], logs)


class _Gradient:
    """One gradient that processes compute together."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.nested = False  # whether inputs of a divided pass have gradients, as the outputs of another divided pass


_active: list[_Gradient | None] = [None]


@contextmanager
def dividing(ranks: Ranks | None) -> Iterator[None]:
    """Divide the passes of networks among processes. With None, they are not divided."""
    _active.append(None if ranks is None else _Gradient(ranks))
    try:
        yield
    finally:
        _active.pop()


def divided(function: Callable[..., Any], *rows: Tensor | None, dim: int = 0) -> Any:
    """Return `function(*rows)`, computed by all processes together.

    :param function: a pass through a network. Each row of its result depends only on the same row of `rows`.
    :param rows: tensors with the same number of rows. The first is not None.
    :param dim: the dimension of the rows.
    :return: the result, a tensor or a tree of tensors.
    """
    gradient = _active[-1]
    assert rows[0] is not None
    count = rows[0].shape[dim]
    if gradient is None or count < gradient.ranks.size:
        return function(*rows)
    if in_transform():
        raise SandmaskError(
            "This method takes gradients inside its objective, so it cannot be divided over processes. Run it in one "
            "process, without torchrun."
        )
    gradient.nested |= any(some is not None and some.requires_grad for some in rows)
    own = gradient.ranks.share(count)
    length = own.stop - own.start
    with dividing(None):
        part = function(*(None if some is None else some.narrow(dim, own.start, length) for some in rows))
    return pytree.tree_map(lambda t: _Whole.apply(t, gradient, own, count, dim), part)  # type: ignore[no-untyped-call]


class _Whole(Function):
    """Gathers the rows of all processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gradient: _Gradient, own: slice, count: int, dim: int) -> Tensor:
        ctx.gradient, ctx.own, ctx.dim = gradient, own, dim
        shape = list(part.shape)
        shape[dim] = count
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
        whole.narrow(dim, own.start, own.stop - own.start).copy_(part)
        return gradient.ranks.sum(whole)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        """Sum the gradient over processes. Without nested passes, all have the same, so it is multiplied by `size`."""
        (slope,) = slopes
        ranks = ctx.gradient.ranks
        if ctx.gradient.nested:
            slope = ranks.sum(slope.contiguous().clone())
        part = slope.narrow(ctx.dim, ctx.own.start, ctx.own.stop - ctx.own.start)
        return part if ctx.gradient.nested else part * ranks.size, None, None, None, None
