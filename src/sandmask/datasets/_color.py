"""Brightness, contrast, saturation and hue, as torchvision defines them, by another amount for each image."""

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
    span = torch.where(chroma > 0, chroma, 1.0)
    # Hue in sixths of a turn, counted from the channel that is largest: red at 0, green at 2, blue at 4.
    from_green = (blue - red) / span + 2.0
    from_blue = (red - green) / span + 4.0
    hue = torch.where(value == red, (green - blue) / span, torch.where(value == green, from_green, from_blue))
    hue = hue + 6.0 * shift[:, None, None, None]
    # Each channel is `value` in a third of the circle, `value - chroma` in the opposite one, linear between.
    offset = torch.arange(5.0, 0.0, -2.0, device=images.device)[:, None, None]
    place = torch.remainder(hue + offset, 6.0)
    return value - chroma * torch.minimum(place, 4.0 - place).clamp_(0.0, 1.0)


def jitter(images: Tensor, factors: Tensor, hue_shift: Tensor, order: Tensor) -> Tensor:
    """Colour jitter of images [n, 3, h, w] in 0..1, each image in its own order.

    `factors` [n, 3] are of brightness, contrast and saturation; `order` [n, 4] holds the four operations'
    numbers, first to last. Hue is the costly one and is done once for all images: the others come before or
    after it.
    """
    hue_place = (order == HUE).int().argmax(dim=1)
    for place in range(3):
        images = _blend(images, factors, order[:, place], place < hue_place)
    images = shift_hue(images, hue_shift)
    for place in range(1, 4):
        images = _blend(images, factors, order[:, place], place > hue_place)
    return images


def _blend(images: Tensor, factors: Tensor, operation: Tensor, active: Tensor) -> Tensor:
    """One of brightness, contrast or saturation per image, or nothing where not `active`.

    All three are factor * image + (1 - factor) * other, clamped, where other is black, the mean luminance, or
    the luminance.
    """
    chosen = factors.gather(1, operation.clamp(max=SATURATION)[:, None])[:, 0]
    factor = torch.where(active, chosen, 1.0)
    rest = 1.0 - factor
    to_mean = torch.where(operation == CONTRAST, rest, 0.0)[:, None, None, None]
    to_luminance = torch.where(operation == SATURATION, rest, 0.0)[:, None, None, None]
    gray = to_gray(images)
    other = torch.addcmul(to_mean * gray.mean(dim=(2, 3), keepdim=True), gray, to_luminance)
    return torch.addcmul(other, images, factor[:, None, None, None]).clamp_(0.0, 1.0)
