"""Second derivatives of group normalization after a ReLU, of K runs, as a GPU kernel.

Let h be a group of n numbers of one sample, r their inverse standard deviation, z = (h - mean) r, and
y = gamma z + beta. From the gradient g of y, the first derivatives are

- for h: J[a] = r (a - mean(a) - z mean(a z)) with a = gamma g
- for gamma and beta: the sums of g z and of g.

Let q be the gradient of J[a], u the gradient of the sums of g z, and w the gradient of the sums of g. Then the
gradients are

- of g: gamma J[q] + u z + w
- of gamma: the sum of g J[q]
- of h: J[u g - r (B q + C a)] - r^2 z (mean(q a) - Q A - B C), with the means A of a, B of a z, Q of q and C of q z.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.norm import block_of, by_group, by_pixel, image_of
from sandmask.functional.kernels.tiles import Passes

SECOND = Passes(2048, 8, 1)


class Image(NamedTuple):
    """An image before normalization, [K, N, height, width, channels], with mean and inverse deviation of each group."""

    h: Tensor
    mean: Tensor
    scale: Tensor
    groups: int


@triton.jit
def _second_kernel(
    grad,
    of_before,
    h,
    mean,
    scale,
    gamma,
    of_gamma,
    of_beta,
    to_grad,
    to_h,
    to_gamma,
    grad_run,
    grad_sample,
    grad_pixel,
    gamma_run,
    of_gamma_run,
    of_beta_run,
    n_pixels: tl.constexpr,
    channels: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    run, sample, image, channel, group, pixel, place = image_of(channels, groups, block)
    grad += run * grad_run + sample * grad_sample
    across = pixel[:, None] * grad_pixel + channel[None, :]
    h += image * n_pixels * channels
    of_before += image * n_pixels * channels
    to_grad += image * n_pixels * channels
    to_h += image * n_pixels * channels
    m = tl.load(mean + image * groups + group)
    r = tl.load(scale + image * groups + group)
    slope = tl.load(gamma + run * gamma_run + channel).to(tl.float32)
    u = tl.load(of_gamma + run * of_gamma_run + channel).to(tl.float32)
    w = tl.load(of_beta + run * of_beta_run + channel).to(tl.float32)
    size = n_pixels * (channels // groups)

    sum_g = tl.zeros((block, channels), tl.float32)
    sum_gz = tl.zeros((block, channels), tl.float32)
    sum_q = tl.zeros((block, channels), tl.float32)
    sum_qz = tl.zeros((block, channels), tl.float32)
    sum_qg = tl.zeros((block, channels), tl.float32)
    for start in tl.range(0, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        g = tl.load(grad + start * grad_pixel + across, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(of_before + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        q = tl.where(value > 0, q, tl.where(value == 0, 0.0, value))  # NaN propagates
        z = (value - m[None, :]) * r[None, :]
        sum_g += g
        sum_gz += g * z
        sum_q += q
        sum_qz += q * z
        sum_qg += q * g
    of_g, of_gz, of_qg = tl.sum(sum_g, axis=0), tl.sum(sum_gz, axis=0), tl.sum(sum_qg, axis=0)
    mean_a = by_group(slope * of_g, channels, groups) / size
    mean_az = by_group(slope * of_gz, channels, groups) / size
    mean_q = by_group(tl.sum(sum_q, axis=0), channels, groups) / size
    mean_qz = by_group(tl.sum(sum_qz, axis=0), channels, groups) / size
    mean_qa = by_group(slope * of_qg, channels, groups) / size
    mean_u = by_group(u * of_g, channels, groups) / size
    mean_uz = by_group(u * of_gz, channels, groups) / size
    tl.store(to_gamma + image * channels + channel, r * (of_qg - mean_q * of_g - mean_qz * of_gz))

    # Of h: r (u g - r (B q + C a) - level - tilt z).
    level = mean_u - r * (mean_az * mean_q + mean_qz * mean_a)
    tilt = mean_uz + r * (mean_qa - mean_q * mean_a - 3.0 * mean_az * mean_qz)
    by_g, by_q = u - r * mean_qz * slope, r * mean_az
    for start in tl.range(0, n_pixels, block, num_stages=stages):
        inside = (start + pixel < n_pixels)[:, None]
        g = tl.load(grad + start * grad_pixel + across, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(h + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(of_before + start * channels + place, mask=inside, other=0.0).to(tl.float32)
        q = tl.where(value > 0, q, tl.where(value == 0, 0.0, value))
        z = (value - m[None, :]) * r[None, :]
        along = (q - mean_q[None, :] - z * mean_qz[None, :]) * r[None, :]
        tl.store(to_grad + start * channels + place, slope[None, :] * along + u[None, :] * z + w[None, :], mask=inside)
        result = (by_g[None, :] * g - by_q[None, :] * q - level[None, :] - tilt[None, :] * z) * r[None, :]
        tl.store(to_h + start * channels + place, result, mask=inside)


def normalize_second(
    grad: Tensor, of_before: Tensor, image: Image, gamma: Tensor, of_gamma: Tensor, of_beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the results of `normalize_backward` with respect to `grad`, h, and gamma of each sample.

    :param grad: gradient of the normalized image.
    :param of_before: gradient of the first result of `normalize_backward`, with the shape of h.
    :param image: the image before normalization.
    :param gamma: scale of the channels [K, channels].
    :param of_gamma: gradient of gamma's gradient.
    :param of_beta: gradient of beta's gradient.
    """
    h, n_groups = image.h, image.groups
    n_runs, n_samples, height, width, channels = h.shape
    to_grad, to_h = torch.empty_like(h), torch.empty_like(h)
    to_gamma = torch.empty(n_runs, n_samples, channels, device=h.device)
    grad = by_pixel(grad)
    strides = (*(grad.stride(i) for i in (0, 1, 3)), *(rows.stride(0) for rows in (gamma, of_gamma, of_beta)))
    block = block_of(height * width, channels, SECOND)
    sizes = (height * width, channels, n_groups, block, SECOND.stages)
    tensors = (grad, of_before, h, image.mean, image.scale, gamma, of_gamma, of_beta, to_grad, to_h, to_gamma)
    launch: Any = _second_kernel[(n_samples, n_runs)]
    launch(*tensors, *strides, *sizes, num_warps=SECOND.warps)
    return to_grad, to_h, to_gamma
