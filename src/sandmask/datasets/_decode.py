"""From an image file to pixels."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sandmask.errors import SandmaskError

PNG = b"\x89PNG"  # how such files begin


class CorruptImageError(SandmaskError):
    """An image that cannot be decoded; `path` names it."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} cannot be decoded ({reason}). Replace or remove it, or leave such images out with --skip-corrupt "
            "(in Python: skip_corrupt=True)."
        )
        self.path = path


class Decoded(NamedTuple):
    """An image at its storage size, and the shape that it had."""

    pixels: Tensor  # [height, width, 3] uint8
    aspect: float  # width / height of the file's image


def decode(path: Path, size: int | None = None) -> Decoded:
    """Read an image as RGB; squeeze it to `size` x `size` (bilinear, antialiased) unless it has that size."""
    try:
        content = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    except OSError as error:
        raise SandmaskError(f"{path} cannot be read ({error.strerror or error}).") from error
    image = _decode_natively(path, content)
    if image is None:
        image = _decode_with_pillow(path)
    _, height, width = image.shape
    return Decoded(squeeze(image, size).permute(1, 2, 0), width / height)


def squeeze(image: Tensor, size: int | None) -> Tensor:
    """Pixels [3, height, width], uint8, at the size that images are stored at."""
    if size is None or image.shape[1:] == (size, size):
        return image
    return F.interpolate(image[None], (size, size), mode="bilinear", antialias=True)[0]


def common_size(paths: Iterable[Path]) -> int | None:
    """The side that all these images have in common; None if they differ or are not square."""
    from PIL import Image

    sizes = set()
    for path in paths:
        try:
            with Image.open(path) as image:
                sizes.add(image.size)
        except OSError:
            continue  # said, or skipped, when it is decoded
    width, height = sizes.pop() if len(sizes) == 1 else (0, 1)
    return width if width == height else None


def _decode_natively(path: Path, content: Tensor) -> Tensor | None:
    """Pixels [3, height, width], or None where Pillow has to try.

    torchvision's decoders let other threads run all the while; Pillow holds Python's lock for a good part.
    """
    from torchvision.io import ImageReadMode, decode_image

    try:
        image: Tensor = decode_image(content, mode=ImageReadMode.RGB)
    except (RuntimeError, ValueError) as error:
        if bytes(content[:4].tolist()) == PNG:  # Pillow takes damaged ones for good
            raise CorruptImageError(path, str(error).splitlines()[0]) from error
        return None
    return image if image.dtype == torch.uint8 and image.ndim == 3 else None


def _decode_with_pillow(path: Path) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptImageError(path, error) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)
