"""Moments of gradients `[E, *shape]` that are all in memory, computed in two passes."""

import math

import torch
from torch import Tensor

from sandmask._physical import in_transform
from sandmask._scratch import scratch
from sandmask.masks._functional import TensorMoments, log_magnitude

# The number of elements that are processed together. On a CPU, both passes then stay in the cache. On other devices,
# temporaries stay small.
_CHUNK_CPU = 2**20
_CHUNK = 2**26

# The number of columns of a piece in `fold_runs`, where pieces come before environments. Threads divide every pass by
# its outermost dimension. If environments were outermost, a thread would add up numbers that another thread wrote.
PIECE = 1024
_WHOLE = 2**17  # up to this many numbers, the gradients of a run are not divided into pieces that leave a remainder


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments: float32, or float64 for float64 gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_moments(grads: Tensor, *, log: bool = False) -> TensorMoments:
    """Compute moments over the first dimension of gradients; works under `torch.func.vmap`.

    :param grads: gradients `[E, *shape]`.
    :param log: also sum log(|g| + 1e-10).
    :return: the moments.
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
    """Whether the tensor is on a CPU, and functions may work in place and branch on its values."""
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
    """Write `_moments` of x `[..., E, n]` to `moments` `[3, ..., n]`. Numbers are scaled only after an overflow."""
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
        for index in (~mean.isfinite().all(-1)).nonzero().tolist():
            moments[(slice(None), *index)] = torch.stack(_moments(x[tuple(index)], log=False))


def _moments(grads: Tensor, *, log: bool) -> tuple[Tensor, ...]:
    """Sign sum, mean, M2 and, with `log`, log sum, in two passes around the first environment.

    Differences from the first environment are scaled by a small power of two, so that neither the differences nor their
    sum can overflow. The scaling is exact, and identical gradients have a variance of exactly 0.
    """
    x = grads.to(accumulation_dtype(grads.dtype))
    count = x.shape[0]
    scale = 2.0 ** -math.ceil(math.log2(2 * count))

    difference = torch.add(x[0] * -scale, x, alpha=scale)
    half_shift = difference.sum(0) * (0.5 / (scale * count))
    half_mean = x[0] * 0.5 + half_shift
    mean = half_mean * 2
    if not in_transform():  # in place, which moves a third of the memory
        squares = difference.mul_(0.5 / scale).sub_(half_shift).square_()
    else:  # `vmap` has no rule for the operations in place
        squares = torch.add(-half_shift, difference, alpha=0.5 / scale).square()
    m2 = squares.sum(0) * 4
    moments = (x.sign().sum(0), mean, m2)
    return (*moments, log_magnitude(x).sum(0)) if log else moments
