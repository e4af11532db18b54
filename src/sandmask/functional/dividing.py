"""Passes through a network that several processes divide: each computes some of the rows, and all get all of them.

The gradient that each process then has is its own part: the mean over processes is the gradient of one process that
computes all rows. This holds for parameters that the divided passes use, and for those that are used beside them, which
every process has the whole gradient of.
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
from sandmask.functional.ranks import Ranks


class _Gradient:
    """One gradient that processes take together."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.nested = False  # whether inputs of a divided pass have gradients, which may be of another one's outputs


_active: list[_Gradient | None] = [None]


@contextmanager
def dividing(ranks: Ranks | None) -> Iterator[None]:
    """Divide the passes of networks among processes; with None, leave them whole again."""
    _active.append(None if ranks is None else _Gradient(ranks))
    try:
        yield
    finally:
        _active.pop()


def divided(function: Callable[..., Any], *rows: Tensor | None, dim: int = 0) -> Any:
    """`function(*rows)`, where each row of the result, or of its tensors, depends on the same row of `rows` alone.

    :param function: a pass through a network.
    :param rows: tensors with the same number of rows, the first one not None.
    :param dim: the dimension of the rows.
    """
    gradient = _active[-1]
    assert rows[0] is not None
    count = rows[0].shape[dim]
    if gradient is None or count < gradient.ranks.size:
        return function(*rows)
    if in_transform():
        raise SandmaskError(
            "This method takes gradients by torch.func inside of its objective, which processes cannot divide. Run it "
            "in one process, without torchrun."
        )
    gradient.nested |= any(some is not None and some.requires_grad for some in rows)
    own = gradient.ranks.share(count)
    length = own.stop - own.start
    with dividing(None):
        part = function(*(None if some is None else some.narrow(dim, own.start, length) for some in rows))
    return pytree.tree_map(lambda t: _Whole.apply(t, gradient, own, count, dim), part)  # type: ignore[no-untyped-call]


class _Whole(Function):
    """All rows, of every process's own."""

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
        """The sum over processes of what they have; it is the same in all of them unless passes are nested."""
        (slope,) = slopes
        ranks = ctx.gradient.ranks
        if ctx.gradient.nested:
            slope = ranks.sum(slope.contiguous().clone())
        part = slope.narrow(ctx.dim, ctx.own.start, ctx.own.stop - ctx.own.start)
        return part if ctx.gradient.nested else part * ranks.size, None, None, None, None
