"""Training augmentation of DomainBed, for a whole batch at once on the device, every image with its own
draws.

RandomResizedCrop, horizontal flip, ColorJitter, RandomGrayscale, as torchvision defines them. Randomness
comes from a key alone (`sandmask.functional.random`), so that a step can be repeated exactly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.datasets._color import jitter, to_gray
from sandmask.functional.random import uniform

CROP_TRIES = 10  # as in torchvision: then the largest central crop of an allowed shape
N_DRAWS = 2 * CROP_TRIES + 12
CPU_BLOCK = 4  # images worked on at a time on a CPU, so that they stay in its cache


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
        """Images [..., 3, height, width], uint8 or float in 0..1 -> float32 [..., 3, size, size] in 0..1.

        `key` is one key for all, or one for each place of the first dimensions: images [K, E, B, ...] with
        keys [K] are augmented run by run as they would be alone.
        `aspects` [...] is width / height of the originals, where the images were squeezed to another shape:
        crops then have the distribution that they would have had on the originals.
        """
        lead = images.shape[:-3]
        flat = images.flatten(0, -4) if lead else images[None]
        draws = uniform(key.to(images.device), *lead[key.ndim :], N_DRAWS).reshape(-1, N_DRAWS)
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
    """Left, top, width and height [n, 4] of random crops, as shares of the image's sides.

    Uses 22 draws in 0..1 an image: ten tries at an area and a shape, the first that fits wins, and two for
    its place.
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
    """Cut boxes (shares of the sides) out of images [n, 3, h, w], flip some, and bring them to `size` x
    `size`.

    Bilinear without antialiasing: stored images are little larger than what is asked for.
    """
    pixels = images / 255.0 if images.dtype == torch.uint8 else images.float()
    steps = (torch.arange(size, device=images.device) + 0.5) / size
    across = torch.where(flip[:, None], 1.0 - steps, steps)
    x = 2.0 * (boxes[:, 0:1] + boxes[:, 2:3] * across) - 1.0
    y = 2.0 * (boxes[:, 1:2] + boxes[:, 3:4] * steps) - 1.0
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
