"""Decode image files. Training, `predict` and `sandmask data verify` read images with this module."""

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

PNG = b"\x89PNG"  # the first bytes of such files


class CorruptImageError(SandmaskError):
    """An image that cannot be decoded; `path` names it, `reason` says why."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} cannot be decoded ({reason}). Replace or remove it, or leave such images out with --skip-corrupt "
            "(in Python: skip_corrupt=True)."
        )
        self.path = path
        self.reason = str(reason)


class UnsupportedPixelsError(ValueError):
    """Pixel values whose range is not known."""


class Decoded(NamedTuple):
    """An image at its storage size, and the shape that it had."""

    pixels: Tensor  # [height, width, 3] uint8
    aspect: float  # width / height of the file's image


def decode(path: Path, size: int | None = None, content: bytes | None = None) -> Decoded:
    """Read an image as RGB; squeeze it to `size` x `size` (bilinear, antialiased) unless it has that size.

    An image that is not a file is given as `content`; `path` is then its name in messages. See `rgb_pixels` for images
    that are not 8-bit RGB. Orientation tags are ignored except in TIFF files, as in torchvision's `ImageFolder`.
    """
    try:
        encoded = np.fromfile(path, np.uint8) if content is None else np.frombuffer(bytearray(content), np.uint8)
    except OSError as error:
        raise SandmaskError(f"{path} cannot be read ({error.strerror or error}).") from error
    _size_of(path, content)  # refuses a small file that would decode to gigabytes
    image = _decode_natively(path, torch.from_numpy(encoded))
    if image is None:
        image = _decode_with_pillow(path, content)
    _, height, width = image.shape
    return Decoded(squeeze(image, size).permute(1, 2, 0), width / height)


def squeeze(image: Tensor, size: int | None) -> Tensor:
    """Pixels [3, height, width], uint8, at the size that images are stored at."""
    if size is None or image.shape[1:] == (size, size):
        return image
    return F.interpolate(image[None], (size, size), mode="bilinear", antialias=True)[0]


def common_size(images: Iterable[tuple[Path, bytes | None]]) -> int | None:
    """The side that all these images (as `decode` takes them) have in common; None if they differ or are not square."""
    sizes: set[tuple[int, int]] = set()
    for path, content in images:
        with suppress(CorruptImageError):  # reported, or skipped, when the image is decoded
            if size := _size_of(path, content):
                sizes.add(size)
    width, height = sizes.pop() if len(sizes) == 1 else (0, 1)
    return width if width == height else None


def rgb_pixels(image: "Picture") -> Tensor:
    """The pixels of a Pillow image as RGB: [3, height, width], uint8.

    - Grey, black and white, palette and CMYK images are converted; transparency is dropped.
    - Of 16-bit values the upper 8 bits are used, so that 65535 becomes 255.
    - Float values should be in 0..1.
    - Other integers (32-bit, or signed) and other floats raise `UnsupportedPixelsError`: their range is not known.
    """
    if image.mode.startswith("I"):
        grey = _upper_bits(image)
    elif image.mode == "F":
        grey = _unit_range(np.asarray(image))
    else:
        if image.mode == "La":  # which Pillow converts to LA alone
            image = image.convert("LA")
        if "transparency" in image.info:  # the same colours, without Pillow's warning
            image = image.convert("RGBA")
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return torch.from_numpy(grey).expand(3, -1, -1)


def _upper_bits(image: "Picture") -> NDArray[np.uint8]:
    """Grey values of 16 bits as 8 bits. Pillow opens some 16-bit formats with 32 bits (mode I)."""
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        raise UnsupportedPixelsError(
            "its pixels are 32-bit or signed integers, whose range is not known; convert it to 8 or 16 bits"
        )
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    bits = tags.get(258, (16,))[0]  # BitsPerSample: 12 bits come in 16
    values = np.asarray(image).astype(np.int64)
    if tags.get(262) == 0:  # PhotometricInterpretation: 0 is white, which Pillow does not undo for 16 bits
        values = (1 << bits) - 1 - values
    upper: NDArray[np.uint8] = (values >> (bits - 8)).clip(0, 255).astype(np.uint8)
    return upper


def _unit_range(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Float values in 0..1 as 8 bits."""
    low, high = float(values.min()), float(values.max())  # NaN if any value is
    if not (low >= 0.0 and high <= 1.0):
        raise UnsupportedPixelsError(
            f"its pixels are floats from {low:.4g} to {high:.4g}, and should be in 0..1; rescale them, or convert it "
            "to 8 or 16 bits"
        )
    scaled: NDArray[np.uint8] = np.rint(values * 255.0).astype(np.uint8)
    return scaled


def _size_of(path: Path, content: bytes | None) -> tuple[int, int] | None:
    """Width and height from the image's header, if Pillow can read it; an error above Pillow's limit of pixels."""
    from PIL import Image

    try:
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            return image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CorruptImageError(path, str(error).split(",")[0]) from error
    except Exception:  # noqa: BLE001 - not an image as far as Pillow can tell: the decoders say why
        return None


def _decode_natively(path: Path, content: Tensor) -> Tensor | None:
    """Pixels [3, height, width], or None if Pillow should decode the image.

    torchvision's decoders release Python's lock, and Pillow holds it part of the time.
    """
    from torchvision.io import ImageReadMode, decode_image

    try:
        image: Tensor = decode_image(content, mode=ImageReadMode.RGB)
    except (RuntimeError, ValueError) as error:
        if bytes(content[:4].tolist()) == PNG:  # Pillow accepts damaged ones
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
