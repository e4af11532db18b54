"""Moments of gradients that are all there at once, `[E, *shape]`: two passes over them."""

import math

import torch
from torch import Tensor

from sandmask._physical import in_transform
from sandmask._scratch import scratch
from sandmask.masks._functional import TensorMoments, log_magnitude

# Elements worked on at a time: on a CPU so many that the passes below stay in the cache, elsewhere only so
# many that temporaries stay small.
_CHUNK_CPU = 2**20
_CHUNK = 2**26

# Columns that come before environments in `fold_runs`. Threads divide every pass by its outermost dimension: with
# environments outermost, a thread would add up what another one wrote.
PIECE = 1024
_WHOLE = 2**17  # gradients of a run that are not divided, if that would leave a rest


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments: float32, or float64 for float64 gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_moments(grads: Tensor, *, log: bool = False) -> TensorMoments:
    """Compute moments over the first dimension of gradients; works under `torch.func.vmap`.

    :param grads: gradients `[E, *shape]`.
    :param log: also sum log(|g| + 1e-10).
    """
    count, shape = grads.shape[0], grads.shape[1:]
    if not log and works_in_place(grads):
        moments = torch.empty(3, *shape, dtype=accumulation_dtype(grads.dtype))
        fold_runs(grads.reshape(1, count, -1).to(moments.dtype), moments.view(3, 1, -1))
        return TensorMoments(count, *moments)
    columns = max((_CHUNK_CPU if grads.device.type == "cpu" else _CHUNK) // count, 1)
    if shape.numel() <= columns or not grads.is_contiguous():
        return TensorMoments(count, *_moments(grads, log=log))
    parts = [_moments(chunk, log=log) for chunk in torch.split(grads.reshape(count, -1), columns, dim=1)]
    return TensorMoments(count, *(torch.cat(part).reshape(shape) for part in zip(*parts, strict=True)))


def works_in_place(tensor: Tensor) -> bool:
    """Whether functions can be used on this tensor that work in place and branch on values, on a CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or torch.compiler.is_compiling():
        return False
    return not in_transform() and not (tensor.requires_grad and torch.is_grad_enabled())


def fold_runs(grads: Tensor, moments: Tensor) -> None:
    """Compute the moments of K runs' gradients on a CPU, in few passes over memory.

    The result equals `gradient_moments` of each run.

    :param grads: gradients `[K, E, n]`.
    :param moments: target `[3, K, n]`: sums of signs, means and sums of squared deviations.
    """
    n_runs, count, size = grads.shape
    together, columns = max(_CHUNK_CPU // max(count * size, 1), 1), max(_CHUNK_CPU // count, 1)
    piece = min(PIECE, columns)
    columns -= columns % piece
    rest = size % piece
    if rest and count * size <= _WHOLE:
        rest = size
    for first in range(0, n_runs, together):
        runs = slice(first, first + together)
        for left in range(0, size - rest, columns):
            part = slice(left, min(left + columns, size - rest))
            pieces = torch.unflatten(grads[runs, :, part], 2, (-1, piece)).transpose(1, 2)
            _fold(pieces, torch.unflatten(moments[:, runs, part], 2, (-1, piece)))
        if rest:
            _fold(grads[runs, :, -rest:], moments[:, runs, -rest:])


def _fold(x: Tensor, moments: Tensor) -> None:
    """`_moments` of x `[..., E, n]` into `moments` `[3, ..., n]`, without its scaling, unless something overflows."""
    sign_sum, mean, m2 = moments
    work = scratch("moments", x.shape, x.dtype)
    first = x[..., :1, :]
    torch.sub(x, first, out=work)
    shift = work.sum(-2, keepdim=True).mul_(1.0 / x.shape[-2])
    torch.add(first.squeeze(-2), shift.squeeze(-2), out=mean)
    torch.ops.aten.mse_loss.out(work, shift.expand_as(work), 0, out=work)  # squared differences, in one pass
    torch.sum(work, -2, out=m2)
    torch.sum(torch.sign(x, out=work), -2, out=sign_sum)
    if not math.isfinite(mean.sum()):
        for place in (~mean.isfinite().all(-1)).nonzero().tolist():
            moments[(slice(None), *place)] = torch.stack(_moments(x[tuple(place)], log=False))


def _moments(grads: Tensor, *, log: bool) -> tuple[Tensor, ...]:
    """Sign sum, mean, M2 and, with `log`, log sum, in two passes around the first environment.

    Differences from the first environment are taken at the scale of a power of two so small that neither
    they nor their sum can overflow; the scaling itself is exact, and identical gradients have a variance of
    exactly 0.
    """
    x = grads.to(accumulation_dtype(grads.dtype))
    count = x.shape[0]
    scale = 2.0 ** -math.ceil(math.log2(2 * count))

    difference = torch.add(x[0] * -scale, x, alpha=scale)
    half_shift = difference.sum(0) * (0.5 / (scale * count))
    half_mean = x[0] * 0.5 + half_shift
    mean = half_mean * 2
    if not in_transform():  # in place: a third of the memory to go through
        squares = difference.mul_(0.5 / scale).sub_(half_shift).square_()
    else:  # `vmap` has no rule for that
        squares = torch.add(-half_shift, difference, alpha=0.5 / scale).square()
    m2 = squares.sum(0) * 4
    moments = (x.sign().sum(0), mean, m2)
    return (*moments, log_magnitude(x).sum(0)) if log else moments
