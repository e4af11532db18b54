"""DomainBed's training augmentation, for a whole batch on the device, with separate random numbers for each image.

It consists of RandomResizedCrop, horizontal flip, ColorJitter and RandomGrayscale, as torchvision defines them. Random
numbers depend only on a key (`sandmask.functional.random`), so that a step can be repeated exactly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.functional.random import uniform

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
GRAY_WEIGHTS = (0.2989, 0.587, 0.114)
CROP_TRIES = 10  # as in torchvision; if none fits, the crop is the largest central one of an allowed shape
N_DRAWS = 2 * CROP_TRIES + 12
CPU_BLOCK = 4  # number of images that a CPU processes at a time, so that they stay in its cache


def draws_of(key: Tensor, shape: torch.Size) -> Tensor:
    """Return the random numbers in 0..1 for the augmentation of images [*shape, ...]. For `key` see `Augmentation`."""
    return uniform(key, *shape[key.ndim :], N_DRAWS)


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images, in this order: crop, resize, flip, colours, grey."""

    size: int = 224
    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.3
    contrast: float = 0.3
    saturation: float = 0.3
    hue: float = 0.3
    grayscale: float = 0.1

    def __call__(self, images: Tensor, key: Tensor, aspects: Tensor | None = None) -> Tensor:
        """Augment images [..., 3, height, width], uint8 or float in 0..1, to float32 [..., 3, size, size] in 0..1.

        `key` is a single key, or has one key for each position in the first dimensions. With keys [K], images
        [K, E, B, ...] are augmented as K runs alone would augment them.
        `aspects` [...] are width / height of the original images, if images were resized to another shape. Crops then
        have the same distribution as crops of the originals.
        """
        return self.apply(images, draws_of(key.to(images.device), images.shape[:-3]), aspects)

    def apply(self, images: Tensor, draws: Tensor, aspects: Tensor | None = None) -> Tensor:
        """Augment images with random numbers [..., N_DRAWS] from `draws_of`."""
        lead = images.shape[:-3]
        flat, draws = images.reshape(-1, *images.shape[-3:]), draws.reshape(-1, N_DRAWS)
        if aspects is None:
            aspect = torch.full((len(flat),), images.shape[-1] / images.shape[-2], device=images.device)
        else:
            aspect = aspects.reshape(-1)
        block = CPU_BLOCK if images.device.type == "cpu" else len(flat)
        parts = zip(*(torch.split(each, block) for each in (flat, draws, aspect)), strict=True)
        done = [self._augment(*part) for part in parts]
        return (done[0] if len(done) == 1 else torch.cat(done)).reshape(*lead, 3, self.size, self.size)

    def _augment(self, images: Tensor, draws: Tensor, aspects: Tensor) -> Tensor:
        crops, rest = draws[:, : 2 * CROP_TRIES + 2], draws[:, 2 * CROP_TRIES + 2 :]
        boxes = crop_boxes(crops, aspects, self.scale, self.ratio)
        x = crop(images, boxes, rest[:, 0] < self.flip, self.size)
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        *changes, hue_shift = (strength * (2.0 * rest[:, 1 + i] - 1.0) for i, strength in enumerate(strengths))
        factors = 1.0 + torch.stack(changes, dim=1)
        x = jitter(x, factors, hue_shift, torch.argsort(rest[:, 5:9], dim=1, stable=True))
        is_gray = (rest[:, 9] < self.grayscale)[:, None, None, None]
        return torch.where(is_gray, to_gray(x), x)


def crop_boxes(draws: Tensor, aspects: Tensor, scale: tuple[float, float], ratio: tuple[float, float]) -> Tensor:
    """Return left, top, width and height [n, 4] of random crops, as shares of the image's sides.

    This uses 22 draws in 0..1 per image: ten tries of an area and a shape, of which the first that fits is used, and a
    position.
    """
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    area = scale[0] + (scale[1] - scale[0]) * draws[:, :CROP_TRIES]
    shape = torch.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * draws[:, CROP_TRIES : 2 * CROP_TRIES])
    aspect = aspects[:, None]
    widths, heights = torch.sqrt(area * shape / aspect), torch.sqrt(area * aspect / shape)
    fits = (widths <= 1.0) & (heights <= 1.0)
    first = (fits * torch.arange(CROP_TRIES, 0, -1, device=draws.device)).argmax(dim=1, keepdim=True)
    any_fits = fits.any(dim=1, keepdim=True)
    allowed = aspect.clamp(ratio[0], ratio[1])
    width = torch.where(any_fits, widths.gather(1, first), (allowed / aspect).clamp(max=1.0))
    height = torch.where(any_fits, heights.gather(1, first), (aspect / allowed).clamp(max=1.0))
    place = torch.where(any_fits, draws[:, 2 * CROP_TRIES :], 0.5)
    size = torch.cat([width, height], dim=1)
    return torch.cat([place * (1.0 - size), size], dim=1)


def crop(images: Tensor, boxes: Tensor, flip: Tensor, size: int) -> Tensor:
    """Cut boxes (shares of the sides) out of images [n, 3, h, w], flip some, and resize them to `size` x `size`.

    The resizing is bilinear without antialiasing, because stored images are only a little larger than `size`.
    """
    pixels = images / 255.0 if images.dtype == torch.uint8 else images.float()
    steps = (torch.arange(size, device=images.device) + 0.5) / size
    across = torch.where(flip[:, None], 1.0 - steps, steps)
    x = 2.0 * (boxes[:, 0:1] + boxes[:, 2:3] * across) - 1.0
    y = 2.0 * (boxes[:, 1:2] + boxes[:, 3:4] * steps) - 1.0
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def jitter(images: Tensor, factors: Tensor, hue_shift: Tensor, order: Tensor) -> Tensor:
    """Apply colour jitter to images [n, 3, h, w] in 0..1, with the four operations in a separate order for each image.

    `factors` [n, 3] are those of brightness, contrast and saturation. `order` [n, 4] has the numbers of the operations,
    first to last. Hue takes the longest and is changed for all images at once; the other operations come before or
    after it.
    """
    hue_place = (order == HUE).int().argmax(dim=1, keepdim=True)
    place = torch.arange(4, device=order.device)
    operation = torch.cat([order[:, :3], order[:, 1:]], dim=1)  # up to three before hue, up to three after it
    active = torch.cat([place[:3] < hue_place, place[1:] > hue_place], dim=1)
    chosen = factors.gather(1, operation.clamp(max=SATURATION))
    factor = torch.where(active, chosen, 1.0)  # a factor of 1 changes nothing
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
    """Change the brightness, the contrast or the saturation of each image.

    All three compute factor * image + (1 - factor) * other, clamped to 0..1, where other is black, the mean luminance
    or the luminance.
    """
    gray = to_gray(images)
    other = torch.addcmul(to_mean * gray.mean(dim=(2, 3), keepdim=True), gray, to_luminance)
    return torch.addcmul(other, images, factor).clamp_(0.0, 1.0)


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of images [n, 3, h, w] by `shift` [n], as a share of a full turn. Value and saturation are kept."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    span = chroma.clamp(min=1e-12)  # if it is 0, so are the differences that are divided by it
    # Hue in sixths of a turn, computed from the largest channel: red is at 0, green at 2, blue at 4.
    from_green = (blue - red).div_(span).add_(2.0)
    from_blue = (red - green).div_(span).add_(4.0)
    hue = torch.where(value == red, (green - blue).div_(span), torch.where(value == green, from_green, from_blue))
    hue += 6.0 * shift[:, None, None, None]
    # A channel is `value` up to one sixth of a turn from its own hue, `value - chroma` from two sixths on, and linear
    # in between, where `near` goes from 1 to 2.
    from_opposite = torch.arange(3.0, -2.0, -2.0, device=images.device)[:, None, None]  # red, green, blue
    near = (hue + from_opposite).remainder_(6.0).sub_(3.0).abs_().clamp_(1.0, 2.0)
    return torch.addcmul(value + chroma, chroma, near, value=-1.0)


def to_gray(images: Tensor) -> Tensor:
    """Return the luminance [n, 1, h, w] of images [n, 3, h, w]."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    luminance = red * GRAY_WEIGHTS[0]
    return luminance.add_(green, alpha=GRAY_WEIGHTS[1]).add_(blue, alpha=GRAY_WEIGHTS[2])
