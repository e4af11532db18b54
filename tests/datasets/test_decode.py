"""Images that are not 8-bit RGB: how their values become pixels, or why they are refused."""

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sandmask.datasets import CorruptImageError
from sandmask.datasets._decode import common_size, decode
from sandmask.errors import SandmaskError
from sandmask.training.preprocessing import Preprocessing

RAMP = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
EXPECTED = (RAMP >> 8).astype(np.uint8)
GREY = Image.fromarray(EXPECTED)
COLOURS = Image.merge("RGB", (GREY, GREY.transpose(Image.Transpose.FLIP_TOP_BOTTOM), GREY))
PREDICT = Preprocessing((3, 32, 32), "image", 32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def png_of(values: np.ndarray, colour_type: int) -> bytes:
    """A PNG of 16 bits, also with several channels, which Pillow does not write."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def grey_in_every_channel(path: Path) -> np.ndarray:
    """The one channel that all three are equal to, as training reads it; `predict` reads the same."""
    pixels = decode(path).pixels
    assert torch.equal(pixels, pixels[..., :1].expand(-1, -1, 3))
    as_predicted = (PREDICT([path], torch.device("cpu"))[0] * 255).round().to(torch.uint8)
    assert torch.equal(as_predicted, pixels.permute(2, 0, 1))
    return pixels[..., 0].numpy()


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.pgm"])
def test_16_bit_grey_keeps_its_upper_bits(tmp_path: Path, name: str) -> None:
    Image.fromarray(RAMP).save(tmp_path / name)
    assert (grey_in_every_channel(tmp_path / name) == EXPECTED).all()


def test_16_bit_grey_of_either_byte_order_and_direction(tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(">u2")).save(tmp_path / "big.tif")
    with Image.open(tmp_path / "big.tif") as image:
        assert image.mode == "I;16B"
    assert (grey_in_every_channel(tmp_path / "big.tif") == EXPECTED).all()
    Image.fromarray(65535 - RAMP).save(tmp_path / "white.tif", tiffinfo={262: 0})
    assert (grey_in_every_channel(tmp_path / "white.tif") == EXPECTED).all()


@pytest.mark.parametrize(("channels", "colour_type"), [(2, 4), (3, 2), (4, 6)])
def test_16_bit_colours_and_transparency(tmp_path: Path, channels: int, colour_type: int) -> None:
    values = np.stack([RAMP, RAMP[::-1], RAMP.T, RAMP // 2], axis=-1)[..., :channels]
    (tmp_path / "x.png").write_bytes(png_of(values, colour_type))
    colours = values[..., :3] if channels > 2 else values[..., :1].repeat(3, axis=-1)
    assert (decode(tmp_path / "x.png").pixels.numpy() == colours >> 8).all()


def test_floats_in_the_unit_range(tmp_path: Path) -> None:
    Image.fromarray((EXPECTED / 255).astype(np.float32)).save(tmp_path / "x.tif")
    assert (grey_in_every_channel(tmp_path / "x.tif") == EXPECTED).all()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (RAMP.astype(np.float32), r"floats from 0 to 6\.55.* should be in 0\.\.1"),
        (np.full((8, 8), -0.5, dtype=np.float32), r"floats from -0\.5 to"),
        (np.full((8, 8), np.nan, dtype=np.float32), "floats from nan"),
        (RAMP.astype(np.int32), "32-bit or signed integers.*convert it to 8 or 16 bits"),
    ],
)
def test_values_of_unknown_range_are_refused(tmp_path: Path, values: np.ndarray, reason: str) -> None:
    image = Image.fromarray(values)
    image.save(tmp_path / "x.tif")
    with pytest.raises(CorruptImageError, match=rf"x\.tif cannot be decoded.*{reason}"):
        decode(tmp_path / "x.tif")
    for same in (tmp_path / "x.tif", image):
        with pytest.raises(SandmaskError, match=reason):
            PREDICT([same], torch.device("cpu"))


def test_pictures_in_memory_follow_the_same_rules() -> None:
    for image in (Image.fromarray(RAMP), Image.fromarray((EXPECTED / 255).astype(np.float32))):
        pixels = (PREDICT([image], torch.device("cpu"))[0] * 255).round().to(torch.uint8)
        assert (pixels[0].numpy() == EXPECTED).all()


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.gif", "x.webp"])
def test_transparency_is_dropped(tmp_path: Path, name: str) -> None:
    image = COLOURS.quantize(16) if name == "x.gif" else COLOURS.copy()
    if name != "x.gif":
        image.putalpha(GREY.point(lambda value: 255 if value > 127 else 0))
    if name == "x.webp":
        image.save(tmp_path / name, lossless=True, exact=True)
    else:
        image.save(tmp_path / name)
    expected = np.array(image.convert("RGB"))
    assert (decode(tmp_path / name).pixels.numpy() == expected).all()


def test_a_palette_with_transparency_gives_no_warning(tmp_path: Path) -> None:
    image = COLOURS.quantize(16)
    image.info["transparency"] = bytes(range(16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = PREDICT([image], torch.device("cpu"))[0]
    del image.info["transparency"]
    assert torch.equal(pixels, PREDICT([image], torch.device("cpu"))[0])


@pytest.mark.parametrize("name", ["x.jpg", "x.tif"])
def test_cmyk(tmp_path: Path, name: str) -> None:
    COLOURS.convert("CMYK").save(tmp_path / name)
    difference = decode(tmp_path / name).pixels.numpy().astype(int) - np.array(COLOURS)
    assert abs(difference).mean() < 4


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    bomb = png_of(np.zeros((1, 1, 1), dtype=np.uint16), 0)
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
    framed = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (tmp_path / "bomb.png").write_bytes(bomb[:8] + framed + bomb[8 + len(framed) :])
    with pytest.raises(CorruptImageError, match=r"bomb\.png cannot be decoded \(Image size .*exceeds limit"):
        decode(tmp_path / "bomb.png")
    assert common_size([(tmp_path / "bomb.png", None)]) is None


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp"])
def test_orientation_tags_are_ignored_as_by_image_folders_of_torchvision(tmp_path: Path, name: str) -> None:
    """In training and in `predict`: a camera on its side gives images on their side."""
    tag = Image.Exif()
    tag[274] = 6  # turn by 90 degrees
    wide = COLOURS.crop((0, 0, 32, 20))
    wide.save(tmp_path / name, exif=tag)
    wide.save(tmp_path / f"plain-{name}")
    files = [tmp_path / name, tmp_path / f"plain-{name}"]
    turned, plain = (decode(file).pixels for file in files)
    assert turned.shape == (20, 32, 3)
    assert torch.equal(turned, plain)
    predicted = PREDICT(files, torch.device("cpu"))
    assert torch.equal(predicted[0], predicted[1])
