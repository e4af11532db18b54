"""The ReLU of a group normalization of K runs, its mean over examples, and the backward pass of both, as GPU kernels.

Images are [K, N, pixels, channels], and the N examples are sorted by environment. `norm.normalize` is the forward pass
without a mean. The mean over the examples of an environment reads the images before the normalization, so that
normalized images are never in memory. Their gradient is not in memory either, because for all examples of an
environment it is a multiple of one image.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.norm import block_of, by_group, by_pixel, image_of, store_sums
from sandmask.functional.kernels.tiles import Passes

# Passes by the bytes of a number.
MEAN = {2: Passes(2048, 4, 1), 4: Passes(2048, 4, 1)}
BACKWARD = {2: Passes(1024, 4, 3), 4: Passes(2048, 8, 4)}


@triton.jit
def _mean_kernel(
    h,
    mean,
    scale,
    gamma,
    beta,
    share,
    out,
    gamma_run,
    beta_run,
    n_samples,
    n_pixels: tl.constexpr,
    channels: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """Some pixels of the mean over the examples of one environment."""
    run, e = tl.program_id(2).to(tl.int64), tl.program_id(1)
    channel, pixel = tl.arange(0, channels), tl.program_id(0) * block + tl.arange(0, block)
    place, inside = pixel[:, None] * channels + channel[None, :], (pixel < n_pixels)[:, None]
    group = channel // (channels // groups)
    gamma_of, beta_of = gamma + run * gamma_run + channel, beta + run * beta_run + channel
    slope, bias = tl.load(gamma_of).to(tl.float32), tl.load(beta_of).to(tl.float32)
    image = run * tl.num_programs(1) + e
    first = image * n_samples
    total = tl.zeros((block, channels), tl.float32)
    for sample in tl.range(n_samples, num_stages=stages):
        m = tl.load(mean + (first + sample) * groups + group)
        r = tl.load(scale + (first + sample) * groups + group) * slope
        value = tl.load(h + (first + sample) * (n_pixels * channels) + place, mask=inside, other=0.0).to(tl.float32)
        y = (value - m[None, :]) * r[None, :] + bias[None, :]
        total += tl.where(y < 0, 0.0, y) * tl.load(share + first + sample)
    tl.store(out + image * (n_pixels * channels) + place, total, mask=inside)


@triton.jit
def _backward_kernel(
    grad,
    h,
    mean,
    scale,
    gamma,
    beta,
    share,
    result,
    sums,
    grad_run,
    grad_sample,
    grad_pixel,
    gamma_run,
    beta_run,
    n_shared,
    shares: tl.constexpr,
    n_pixels: tl.constexpr,
    channels: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """The gradient before the normalization, its sums over pixels, and the sums for gamma and beta."""
    run, sample, image, channel, group, pixel, place = image_of(channels, groups, block)
    grad += run * grad_run + sample // n_shared * grad_sample
    across = pixel[:, None] * grad_pixel + channel[None, :]
    h += image * n_pixels * channels
    result += image * n_pixels * channels
    m = tl.load(mean + image * groups + group)
    r = tl.load(scale + image * groups + group)
    slope = tl.load(gamma + run * gamma_run + channel).to(tl.float32)
    bias = tl.load(beta + run * beta_run + channel).to(tl.float32)
    factor = 1.0
    if shares:
        factor = tl.load(share + image)
    size = n_pixels * (channels // groups)

    of_beta = tl.zeros((block, channels), tl.float32)
    of_gamma = tl.zeros((block, channels), tl.float32)
    for start in tl.range(0, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        g = tl.load(grad + start * grad_pixel + across, mask=inside, other=0.0).to(tl.float32) * factor
        away = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32) - m[None, :]
        g = tl.where(away * (r * slope)[None, :] + bias[None, :] <= 0, 0.0, g)
        of_beta += g
        of_gamma += g * away
    beta_sum = tl.sum(of_beta, axis=0)
    gamma_sum = tl.sum(of_gamma, axis=0) * r
    common = by_group(slope * beta_sum, channels, groups) / size
    along = by_group(slope * gamma_sum, channels, groups) / size * r

    of_bias = tl.zeros((block, channels), tl.float32)
    for start in tl.range(0, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        g = tl.load(grad + start * grad_pixel + across, mask=inside, other=0.0).to(tl.float32) * factor
        away = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32) - m[None, :]
        g = tl.where(away * (r * slope)[None, :] + bias[None, :] <= 0, 0.0, g)
        before = (g * slope[None, :] - common[None, :] - away * along[None, :]) * r[None, :]
        of_bias += tl.where(inside, before, 0.0)
        tl.store(result + start * channels + place, before, mask=inside)
    store_sums(sums, image, channel, tl.sum(of_bias, axis=0), gamma_sum, beta_sum, channels)


def mean_of_normalized(
    h: Tensor, mean: Tensor, scale: Tensor, gamma: Tensor, beta: Tensor, share: Tensor, groups: int
) -> Tensor:
    """The sum over an environment's examples of share * relu(group_norm(h)): [K, E, height, width, channels].

    :param h: images [K, N, height, width, channels].
    :param mean: mean from `norm.normalize`, like `scale`.
    :param share: weights of the examples, contiguous [K, E, N / E].
    """
    n_runs, _, height, width, channels = h.shape
    n_envs, n_samples = share.shape[1:]
    out = torch.empty(n_runs, n_envs, height, width, channels, dtype=h.dtype, device=h.device)
    n_pixels = height * width
    passes = MEAN[h.itemsize]
    block = block_of(n_pixels, channels, passes)
    launch: Any = _mean_kernel[(triton.cdiv(n_pixels, block), n_envs, n_runs)]
    sizes = (gamma.stride(0), beta.stride(0), n_samples, n_pixels, channels, groups, block, passes.stages)
    launch(h, mean, scale, gamma, beta, share, out, *sizes, num_warps=passes.warps)
    return out


def normalize_relu_backward(
    grad: Tensor,
    h: Tensor,
    mean: Tensor,
    scale: Tensor,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    share: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of h, and sums [K, N, 3, channels] over the pixels of each sample.

    Summed over samples, these sums are the gradients of a bias of h, of gamma and of beta.

    :param grad: gradient of the result of the ReLU or, with `share`, of `mean_of_normalized`.
    """
    n_runs, n_samples, height, width, channels = h.shape
    result = torch.empty_like(h)
    sums = torch.empty(n_runs, n_samples, 3, channels, device=h.device)
    grad = by_pixel(grad)
    strides = (grad.stride(0), grad.stride(1), grad.stride(3), gamma.stride(0), beta.stride(0))
    passes = BACKWARD[h.itemsize]
    block = block_of(height * width, channels, passes)
    sizes = (height * width, channels, groups, block, passes.stages)
    launch: Any = _backward_kernel[(n_samples, n_runs)]
    tensors = (grad, h, mean, scale, gamma, beta, scale if share is None else share, result, sums)
    launch(*tensors, *strides, n_samples // grad.shape[1], share is not None, *sizes, num_warps=passes.warps)
    return result, sums
