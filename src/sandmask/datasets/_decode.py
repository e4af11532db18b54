"""Decode images. Training, `predict` and `sandmask data verify` read images with this module."""

import io
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sandmask._text import first_line
from sandmask.errors import SandmaskError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

PNG = b"\x89PNG"  # the first bytes of PNG files


class CorruptImageError(SandmaskError):
    """An image cannot be decoded. `path` is its path, and `reason` the reason."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} cannot be decoded ({reason}). Replace or remove it, or leave such images out with --skip-corrupt "
            "(in Python: skip_corrupt=True)."
        )
        self.path = path
        self.reason = str(reason)


class UnsupportedPixelsError(ValueError):
    """The range of the pixel values of an image is not known."""


class Decoded(NamedTuple):
    """An image at its storage size, and its original aspect ratio."""

    pixels: Tensor  # [height, width, 3] uint8
    aspect: float  # width / height of the file's image


def decode(path: Path, size: int | None = None, content: bytes | None = None) -> Decoded:
    """Read an image as RGB, and resize it to `size` x `size` if it has another size (bilinear, antialiased).

    `content` has the bytes of an image that is not a file; `path` is then its name in messages. See `rgb_pixels` for
    images that are not 8-bit RGB. Orientation tags are ignored except in TIFF files, as in torchvision's `ImageFolder`.
    """
    try:
        encoded = np.fromfile(path, np.uint8) if content is None else np.frombuffer(bytearray(content), np.uint8)
    except OSError as error:
        raise SandmaskError(f"{path} cannot be read ({error.strerror or error}).") from error
    _size_of(path, content)  # raises an error for a small file that would decode to gigabytes
    image = _decode_natively(path, torch.from_numpy(encoded))
    if image is None:
        image = _decode_with_pillow(path, content)
    _, height, width = image.shape
    return Decoded(squeeze(image, size).permute(1, 2, 0), width / height)


def squeeze(image: Tensor, size: int | None) -> Tensor:
    """Resize pixels [3, height, width], uint8, to `size` x `size`, without keeping the aspect ratio."""
    if size is None or image.shape[1:] == (size, size):
        return image
    return F.interpolate(image[None], (size, size), mode="bilinear", antialias=True)[0]


def common_size(images: Iterable[tuple[Path, bytes | None]]) -> int | None:
    """Return the side of images, given as for `decode`; None if they have different sizes or are not square."""
    sizes: set[tuple[int, int]] = set()
    for path, content in images:
        with suppress(CorruptImageError):  # reported or skipped when the image is decoded
            if size := _size_of(path, content):
                sizes.add(size)
    width, height = sizes.pop() if len(sizes) == 1 else (0, 1)
    return width if width == height else None


def rgb_pixels(image: "Picture") -> Tensor:
    """Return the pixels of a Pillow image as RGB: [3, height, width], uint8.

    - Grey, black and white, palette and CMYK images are converted. Transparency is dropped.
    - Of 16-bit values, the upper 8 bits are used, so that 65535 becomes 255.
    - Float values should be in 0..1.
    - Other integers (32-bit or signed) and other floats raise `UnsupportedPixelsError`, because their range is not
      known.
    """
    if image.mode.startswith("I"):
        grey = _upper_bits(image)
    elif image.mode == "F":
        grey = _unit_range(np.asarray(image))
    else:
        if image.mode == "La":  # Pillow converts this mode only to LA
            image = image.convert("LA")
        if "transparency" in image.info:  # gives the same colours without Pillow's warning
            image = image.convert("RGBA")
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return torch.from_numpy(grey).expand(3, -1, -1)


def _upper_bits(image: "Picture") -> NDArray[np.uint8]:
    """Return 16-bit grey values as 8 bits. Pillow opens some 16-bit formats with 32 bits (mode I)."""
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        raise UnsupportedPixelsError(
            "its pixels are 32-bit or signed integers, whose range is not known; convert it to 8 or 16 bits"
        )
    tags = getattr(image, "tag_v2", {})  # of a TIFF file
    bits = tags.get(258, (16,))[0]  # BitsPerSample; 12-bit values have a type of 16 bits
    values = np.asarray(image).astype(np.int64)
    if tags.get(262) == 0:  # PhotometricInterpretation: 0 is white; Pillow does not invert 16 bits
        values = (1 << bits) - 1 - values
    upper: NDArray[np.uint8] = (values >> (bits - 8)).clip(0, 255).astype(np.uint8)
    return upper


def _unit_range(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return float values in 0..1 as 8 bits."""
    low, high = float(values.min()), float(values.max())  # NaN if any value is
    if not (low >= 0.0 and high <= 1.0):
        raise UnsupportedPixelsError(
            f"its pixels are floats from {low:.4g} to {high:.4g}, and should be in 0..1; rescale them, or convert it "
            "to 8 or 16 bits"
        )
    scaled: NDArray[np.uint8] = np.rint(values * 255.0).astype(np.uint8)
    return scaled


def _size_of(path: Path, content: bytes | None) -> tuple[int, int] | None:
    """Return width and height from an image's header, if Pillow can read it. Raise an error above Pillow's limit."""
    from PIL import Image

    try:
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            return image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CorruptImageError(path, str(error).split(",")[0]) from error
    except Exception:  # noqa: BLE001 - not an image for Pillow; the decoders raise the error
        return None


def _decode_natively(path: Path, content: Tensor) -> Tensor | None:
    """Decode with torchvision to pixels [3, height, width]. Return None if Pillow should decode the image.

    torchvision's decoders release Python's lock, which Pillow holds part of the time.
    """
    from torchvision.io import ImageReadMode, decode_image

    try:
        image: Tensor = decode_image(content, mode=ImageReadMode.RGB)
    except (RuntimeError, ValueError) as error:
        if bytes(content[:4].tolist()) == PNG:  # Pillow accepts damaged PNG files
            raise CorruptImageError(path, first_line(error)) from error
        return None
    if image.dtype == torch.uint16 and image.ndim == 3:
        return (image.to(torch.int32) >> 8).to(torch.uint8)
    return image if image.dtype == torch.uint8 and image.ndim == 3 else None


def _decode_with_pillow(path: Path, content: bytes | None) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            return rgb_pixels(image)
    except Exception as error:  # Pillow raises errors of many types for damaged files
        raise CorruptImageError(path, error or type(error).__name__) from error
