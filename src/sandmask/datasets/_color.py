"""Brightness, contrast, saturation and hue, as torchvision defines them, by another amount for each image.

Written for few passes over the pixels: on a GPU these are what takes the time.
"""

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
GRAY_WEIGHTS = (0.2989, 0.587, 0.114)


def to_gray(images: Tensor) -> Tensor:
    """Luminance [n, 1, h, w] of images [n, 3, h, w]."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    luminance = red * GRAY_WEIGHTS[0]
    return luminance.add_(green, alpha=GRAY_WEIGHTS[1]).add_(blue, alpha=GRAY_WEIGHTS[2])


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of images [n, 3, h, w] by `shift` [n] of a full turn; value and saturation stay."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    span = chroma.clamp(min=1e-12)  # where it is 0, so are the differences that it divides
    # Hue in sixths of a turn, counted from the channel that is largest: red at 0, green at 2, blue at 4.
    from_green = (blue - red).div_(span).add_(2.0)
    from_blue = (red - green).div_(span).add_(4.0)
    hue = torch.where(value == red, (green - blue).div_(span), torch.where(value == green, from_green, from_blue))
    hue += 6.0 * shift[:, None, None, None]
    # A channel is `value` up to one sixth of a turn from its own hue, `value - chroma` from two sixths on,
    # and linear between: `near` runs from 1 to 2 there.
    from_opposite = torch.arange(3.0, -2.0, -2.0, device=images.device)[:, None, None]  # red, green, blue
    near = (hue + from_opposite).remainder_(6.0).sub_(3.0).abs_().clamp_(1.0, 2.0)
    return torch.addcmul(value + chroma, chroma, near, value=-1.0)


def jitter(images: Tensor, factors: Tensor, hue_shift: Tensor, order: Tensor) -> Tensor:
    """Colour jitter of images [n, 3, h, w] in 0..1, each image in its own order.

    `factors` [n, 3] are of brightness, contrast and saturation; `order` [n, 4] holds the four operations'
    numbers, first to last. Hue is the costly one and is done once for all images: the others come before or
    after it.
    """
    hue_place = (order == HUE).int().argmax(dim=1, keepdim=True)
    place = torch.arange(4, device=order.device)
    operation = torch.cat([order[:, :3], order[:, 1:]], dim=1)  # three chances before hue, three after it
    active = torch.cat([place[:3] < hue_place, place[1:] > hue_place], dim=1)
    chosen = factors.gather(1, operation.clamp(max=SATURATION))
    factor = torch.where(active, chosen, 1.0)  # 1 does nothing
    to_mean = (1.0 - factor) * (operation == CONTRAST)
    to_luminance = (1.0 - factor) * (operation == SATURATION)
    amounts = torch.stack([factor, to_mean, to_luminance])[..., None, None, None]  # [3, n, 6, 1, 1, 1]
    for chance in range(3):
        images = _blend(images, *amounts[:, :, chance])
    images = shift_hue(images, hue_shift)
    for chance in range(3, 6):
        images = _blend(images, *amounts[:, :, chance])
    return images


def _blend(images: Tensor, factor: Tensor, to_mean: Tensor, to_luminance: Tensor) -> Tensor:
    """One of brightness, contrast or saturation per image.

    All three are factor * image + (1 - factor) * other, clamped, where other is black, the mean luminance, or
    the luminance.
    """
    gray = to_gray(images)
    other = torch.addcmul(to_mean * gray.mean(dim=(2, 3), keepdim=True), gray, to_luminance)
    return torch.addcmul(other, images, factor).clamp_(0.0, 1.0)
