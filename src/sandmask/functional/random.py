"""Random numbers as a pure function of a key.

A key is a 0-dimensional int64 tensor. The same key gives the same numbers on every device, also under
`torch.func.vmap`, and independently of other draws. The random numbers of a run therefore do not depend on the other
runs of its stack, and a run can resume at any step without a saved generator state.

Streams are prefix-stable in every dimension: `uniform(key, 4, 8)[:2, :3]` equals `uniform(key, 2, 3)`. Padding a batch
or a layer therefore does not change the random numbers of the original elements. Keys, uniform numbers and integers are
the same bit for bit. Normal and beta variates are the same up to rounding, because they use logarithms.
"""

import math

import torch
from torch import Tensor

from sandmask._physical import has_kernels, in_vmap, on_all_runs

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_ROUND_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_ROUND_2 = -7723592293110705685  # 0x94D049BB133111EB
_TRIALS = 12  # each is accepted with probability above 0.95, so that all fail with probability under 3e-16


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64. (Torch's shift copies the sign bit.)"""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _wrap(n: int) -> int:
    """A Python integer, wrapped to int64."""
    return (n + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele et al., 2014): every input bit flips each output bit with probability 1/2."""
    x = (x ^ _shift_right(x, 30)) * _ROUND_1
    x = (x ^ _shift_right(x, 27)) * _ROUND_2
    return x ^ _shift_right(x, 31)


def key_of(seed: int) -> Tensor:
    """The initial key of a run with this seed."""
    return _mix(torch.tensor(_wrap(seed), dtype=torch.int64) + _GOLDEN)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """A new key for each value of `data` (an integer or an integer tensor, broadcast against `key`)."""
    if has_kernels(key):
        return _by_kernel(key, data)
    offset = (data + 1) * _GOLDEN
    return _mix(key + (_wrap(offset) if isinstance(offset, int) else offset))


def _by_kernel(key: Tensor, data: Tensor | int) -> Tensor:
    from sandmask.functional.kernels import random as random_kernels

    if not in_vmap():
        return random_kernels.fold(key, data)
    if isinstance(data, Tensor):  # expand to one shape; otherwise, the leading dimension of all runs would broadcast
        shape = torch.broadcast_shapes(key.shape, data.shape)  # type: ignore[no-untyped-call]
        both = key.expand(shape), data.expand(shape)
        return on_all_runs(lambda *all_runs: (random_kernels.fold(*all_runs),), *both)[0]
    return on_all_runs(lambda key: (random_kernels.fold(key, data),), key)[0]


def keys(key: Tensor, *shape: int) -> Tensor:
    """A tensor of independent keys, prefix-stable in every dimension."""
    for size in shape:
        key = fold(key.unsqueeze(-1), torch.arange(size, device=key.device))
    return key


def uniform(key: Tensor, *shape: int) -> Tensor:
    """Float32 numbers in [0, 1), of shape `[*key.shape, *shape]`."""
    return _shift_right(keys(key, *shape), 40).to(torch.float32) * 2.0**-24


def normal(key: Tensor, *shape: int) -> Tensor:
    """Standard normal numbers (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(key, 0), *shape)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 1), *shape))


def integers(key: Tensor, high: Tensor | int, *shape: int) -> Tensor:
    """Integers in 0..high-1; `high` may be a tensor that broadcasts against the result."""
    wide = _shift_right(keys(key, *shape), 32)  # with 32 bits, the bias is below high / 2^32
    return _shift_right(wide * high, 32)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of 0..n-1."""
    return torch.argsort(uniform(key, n), stable=True)


def _log_gamma_variate(key: Tensor, alpha: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Log of Gamma(alpha, 1) variates by Marsaglia and Tsang's method, with a fixed number of trials."""
    d = alpha + 1.0 - 1.0 / 3.0  # for alpha + 1; with the boost below, valid for every alpha > 0
    c = 1.0 / torch.sqrt(9.0 * d)
    trials = fold(key.unsqueeze(-1), torch.arange(2 * _TRIALS, device=key.device))
    x, u = normal(trials[..., ::2], *shape), uniform(trials[..., 1::2], *shape)
    v = (1.0 + c * x) ** 3
    log_v = torch.log(v.clamp_min(1e-30))
    ok = (v > 0) & (torch.log1p(-u) < 0.5 * x * x + d - d * v + d * log_v)
    trial = -1 - len(shape)
    first = ok & (ok.cumsum(trial) == 1)
    value = torch.where(first, d * v, 0.0).sum(trial) + torch.where(ok.any(trial), 0.0, d)
    boost = torch.log1p(-uniform(fold(key, 2 * _TRIALS), *shape)) / alpha
    return torch.log(value) + boost


def symmetric_beta(key: Tensor, alpha: Tensor, *shape: int) -> Tensor:
    """Beta(alpha, alpha) variates, computed from logarithms so that a small alpha does not give 0 / 0."""
    first = _log_gamma_variate(fold(key, 0), alpha, shape)
    second = _log_gamma_variate(fold(key, 1), alpha, shape)
    return torch.sigmoid(first - second)
