"""Group normalization of K runs as GPU kernels. The backward pass includes the derivative of a ReLU before it.

The backward pass of a normalization before a ReLU is in `norm_relu`. Images are [K, N, pixels, channels]. A program
processes one sample of one run, and reads it twice, the second time from the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.moments import welford
from sandmask.functional.kernels.tiles import Passes

EPS = 1e-5
# Passes by the bytes of a number.
FORWARD = {2: Passes(2048, 4, 4), 4: Passes(2048, 4, 3)}
BACKWARD = {2: Passes(2048, 4, 3), 4: Passes(2048, 4, 3)}
SAMPLE_MOMENTS = Passes(2048, 8, 1)


class Normalized(NamedTuple):
    """A normalized image, and the mean and inverse standard deviation of every group: [K, N, groups]."""

    y: Tensor
    mean: Tensor
    scale: Tensor


@triton.jit
def by_group(of_channels, channels: tl.constexpr, groups: tl.constexpr):
    """Sums over each group's channels, for each channel."""
    sums = tl.sum(tl.reshape(of_channels, (groups, channels // groups)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (groups, channels // groups)), (channels,))


@triton.jit
def image_of(channels: tl.constexpr, groups: tl.constexpr, block: tl.constexpr):
    """The indices that a program uses in [K, N, pixels, channels].

    They are run, sample and image (in 64 bits), and for a block of pixels the channels, their groups, the pixels, and
    the addresses of the numbers.
    """
    run, sample = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    channel, pixel = tl.arange(0, channels), tl.arange(0, block)
    place = pixel[:, None] * channels + channel[None, :]
    return run, sample, run * tl.num_programs(0) + sample, channel, channel // (channels // groups), pixel, place


@triton.jit
def store_sums(sums, image, channel, of_bias, of_gamma, of_beta, channels: tl.constexpr):
    """Store the three sums over the pixels of one image that `sample_moments` needs."""
    sums += image * (3 * channels) + channel
    tl.store(sums, of_bias)
    tl.store(sums + channels, of_gamma)
    tl.store(sums + 2 * channels, of_beta)


@triton.jit
def _normalize_kernel(
    h,
    gamma,
    beta,
    y,
    mean_out,
    scale_out,
    gamma_run,
    beta_run,
    n_pixels: tl.constexpr,
    eps: tl.constexpr,
    channels: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    writes: tl.constexpr,
    relu: tl.constexpr,
    pooled: tl.constexpr,
    stages: tl.constexpr,
):
    run, _, image, channel, group, pixel, place = image_of(channels, groups, block)
    h += image * n_pixels * channels
    y += image * (1 if pooled else n_pixels) * channels
    size = n_pixels * (channels // groups)

    # Sum differences from an estimate of the mean (of the first pixels), so that large means do not cancel.
    inside = (pixel < n_pixels)[:, None]
    value = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    seen: tl.constexpr = (min(block, n_pixels)) * (channels // groups)
    about = by_group(tl.sum(value, axis=0), channels, groups) / seen
    total = tl.where(inside, value - about[None, :], 0.0)
    squares = total * total
    for start in tl.range(block, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        value = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, value - about[None, :], 0.0)
        total += away
        squares += away * away
    of_channels = tl.sum(total, axis=0)
    shift = by_group(of_channels, channels, groups) / size
    variance = by_group(tl.sum(squares, axis=0), channels, groups) / size - shift * shift
    mean = about + shift
    # Not tl.maximum, because NaN should propagate.
    scale = 1.0 / tl.sqrt_rn(tl.where(variance < 0, 0.0, variance) + eps)

    if pooled:  # the mean of a normalized channel is the normalized mean of the channel
        slope = scale * tl.load(gamma + run * gamma_run + channel).to(tl.float32)
        bias = tl.load(beta + run * beta_run + channel).to(tl.float32)
        tl.store(y + channel, (of_channels / n_pixels - shift) * slope + bias)
    elif writes:
        slope = scale * tl.load(gamma + run * gamma_run + channel).to(tl.float32)
        bias = tl.load(beta + run * beta_run + channel).to(tl.float32)
        for start in tl.range(0, n_pixels, block, num_stages=stages):
            inside = (start + pixel < n_pixels)[:, None]
            if block < n_pixels:  # otherwise, it is still loaded
                value = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32)
            result = (value - mean[None, :]) * slope[None, :] + bias[None, :]
            if relu:
                result = tl.where(result < 0, 0.0, result)
            tl.store(y + start * channels + place, result, mask=inside)
    first = channel % (channels // groups) == 0
    tl.store(mean_out + image * groups + group, mean, mask=first)
    tl.store(scale_out + image * groups + group, scale, mask=first)


@triton.jit
def _normalize_backward_kernel(
    grad,
    h,
    mean,
    scale,
    gamma,
    more,
    result,
    sums,
    grad_run,
    grad_sample,
    grad_pixel,
    gamma_run,
    has_more: tl.constexpr,
    n_pixels: tl.constexpr,
    channels: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """The gradient before the ReLU, its sums over pixels, and the sums for gamma and beta."""
    run, sample, image, channel, group, pixel, place = image_of(channels, groups, block)
    grad += run * grad_run + sample * grad_sample
    across = pixel[:, None] * grad_pixel + channel[None, :]
    h += image * n_pixels * channels
    more += image * n_pixels * channels
    result += image * n_pixels * channels
    m = tl.load(mean + image * groups + group)
    r = tl.load(scale + image * groups + group)
    slope = tl.load(gamma + run * gamma_run + channel).to(tl.float32)
    size = n_pixels * (channels // groups)

    inside = (pixel < n_pixels)[:, None]
    g = tl.load(grad + across, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    of_beta = g
    of_gamma = g * (value - m[None, :])
    for start in tl.range(block, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        g = tl.load(grad + start * grad_pixel + across, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        of_beta += g
        of_gamma += g * (value - m[None, :])
    beta_sum = tl.sum(of_beta, axis=0)
    gamma_sum = tl.sum(of_gamma, axis=0) * r
    common = by_group(slope * beta_sum, channels, groups) / size
    along = by_group(slope * gamma_sum, channels, groups) / size * r

    of_bias = tl.zeros((block, channels), tl.float32)
    for start in tl.range(0, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        if block < n_pixels:  # otherwise, they are still loaded
            g = tl.load(grad + start * grad_pixel + across, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        before = (g * slope[None, :] - common[None, :] - (value - m[None, :]) * along[None, :]) * r[None, :]
        if has_more:
            before += tl.load(more + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        # The gradient of a NaN output is also NaN.
        before = tl.where(value > 0, before, tl.where(value == 0, 0.0, value))
        of_bias += tl.where(inside, before, 0.0)
        tl.store(result + start * channels + place, before, mask=inside)
    store_sums(sums, image, channel, tl.sum(of_bias, axis=0), gamma_sum, beta_sum, channels)


@triton.jit
def _sample_moments_kernel(
    sums,
    unscale,
    buffers,
    first,
    second,
    third,
    n_envs,
    n_samples,
    buffer,
    out_run,
    scaled: tl.constexpr,
    channels: tl.constexpr,
    block: tl.constexpr,
):
    """Moments over environments of sums over samples, for one of three parameters."""
    run, which = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, channels)
    sums += run * n_envs * n_samples * (3 * channels) + which * channels
    signs = tl.zeros((channels,), tl.float32)
    mean = tl.zeros((channels,), tl.float32)
    m2 = tl.zeros((channels,), tl.float32)
    for e in range(n_envs):
        total = tl.zeros((block, channels), tl.float32)
        for start in range(0, n_samples, block):
            sample = start + tl.arange(0, block)
            place = (e * n_samples + sample)[:, None] * (3 * channels) + channel[None, :]
            total += tl.load(sums + place, mask=(sample < n_samples)[:, None], other=0.0)
        gradient = tl.sum(total, axis=0)
        if scaled:
            gradient *= tl.load(unscale + run * n_envs + e)
        signs, mean, m2 = welford(gradient, e, signs, mean, m2)
    begin = tl.where(which == 0, first, tl.where(which == 1, second, third))
    buffers += run * out_run + begin + channel
    tl.store(buffers, signs)
    tl.store(buffers + buffer, mean)
    tl.store(buffers + 2 * buffer, m2)


def normalize(
    h: Tensor,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    *,
    relu: bool = False,
    writes: bool = True,
    pooled: bool = False,
) -> Normalized:
    """Group normalization of h [K, N, height, width, channels]; gamma and beta are [K, channels].

    With `relu`, the result is the ReLU of it. Without `writes`, only means and deviations are computed, and `y` is h.
    With `pooled` and without `relu`, y is the mean over pixels [K, N, channels], which needs one pass.
    """
    n_runs, n_samples, height, width, channels = h.shape
    y = h.new_empty(n_runs, n_samples, channels) if pooled else torch.empty_like(h) if writes else h
    mean, scale = (torch.empty(n_runs, n_samples, groups, device=h.device) for _ in range(2))
    launch: Any = _normalize_kernel[(n_samples, n_runs)]
    n_pixels = height * width
    passes = FORWARD[h.itemsize]
    block = block_of(n_pixels, channels, passes)
    sizes = (gamma.stride(0), beta.stride(0), n_pixels, EPS, channels, groups, block)
    launch(h, gamma, beta, y, mean, scale, *sizes, writes, relu, pooled, passes.stages, num_warps=passes.warps)
    return Normalized(y, mean, scale)


def normalize_backward(
    grad: Tensor, h: Tensor, mean: Tensor, scale: Tensor, gamma: Tensor, groups: int, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of the input of the ReLU before h, and sums [K, N, 3, channels] over the pixels of each sample.

    Summed over samples, these sums are the gradients of the bias before the ReLU, of gamma and of beta. If `grad` is
    the same for all pixels, its stride between pixels may be 0. `more` is added to the gradient of h.
    """
    n_runs, n_samples, height, width, channels = h.shape
    result = torch.empty_like(h)
    sums = torch.empty(n_runs, n_samples, 3, channels, device=h.device)
    launch: Any = _normalize_backward_kernel[(n_samples, n_runs)]
    grad = by_pixel(grad)
    strides = (grad.stride(0), grad.stride(1), grad.stride(3), gamma.stride(0))
    passes = BACKWARD[h.itemsize]
    block = block_of(height * width, channels, passes)
    sizes = (more is not None, height * width, channels, groups, block, passes.stages)
    also = h if more is None else more.contiguous()
    launch(grad, h, mean, scale, gamma, also, result, sums, *strides, *sizes, num_warps=passes.warps)
    return result, sums


def by_pixel(grad: Tensor) -> Tensor:
    """An image [K, N, height, width, channels] with the same stride, which may be 0, between all adjacent pixels."""
    regular = grad.stride(4) == 1 and grad.stride(2) == grad.shape[3] * grad.stride(3)
    return grad if regular else grad.contiguous()


def sample_moments(
    sums: Tensor, unscale: Tensor | None, n_envs: int, buffers: Tensor, places: tuple[int, int, int]
) -> None:
    """Moments over environments of three gradients, from the sums of `normalize_backward`.

    `buffers` [3, K, P] are sums of signs, means and M2 of flat vectors. `places` are the offsets of the three
    parameters. The gradient of each environment is multiplied by `unscale` [K, E].
    """
    n_runs, n_samples, _, channels = sums.shape
    launch: Any = _sample_moments_kernel[(3, n_runs)]
    sizes = (n_envs, n_samples // n_envs, buffers.stride(0), buffers.stride(1), unscale is not None, channels)
    scale = sums if unscale is None else unscale.contiguous()
    block = block_of(n_samples // n_envs, channels, SAMPLE_MOMENTS)
    launch(sums, scale, buffers, *places, *sizes, block, num_warps=SAMPLE_MOMENTS.warps)


def block_of(n_rows: int, channels: int, passes: Passes) -> int:
    """The number of pixels, or other rows of `channels` numbers, that a program processes at a time."""
    return min(max(passes.numbers // channels, 1), int(triton.next_power_of_2(n_rows)))
