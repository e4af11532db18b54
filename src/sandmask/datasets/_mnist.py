"""The 70,000 MNIST digits, read from the four published files."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._location import data_folder
from sandmask.errors import SandmaskError

SIDE = 28
FOLDERS = ("mnist", "MNIST/raw", "MNIST")  # the second is where torchvision puts them
SHUFFLE_SEED = 0

# md5 of the contents, uncompressed: the same however a copy was gzipped.
CONTENT_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def find_mnist(data_dir: Path | None = None) -> Path | None:
    """The folder with the four files, gzipped or not: one of `FOLDERS` in the data folder."""
    root = data_folder(data_dir)
    for folder in FOLDERS:
        if all(_find_file(root / folder, name) for name in CONTENT_MD5):
            return root / folder
    return None


def read_content(folder: Path, name: str) -> bytes:
    """The bytes of one file, uncompressed and checked."""
    path = _find_file(folder, name)
    if path is None:
        raise SandmaskError(f"{folder / name}.gz is missing. Run `sandmask data download MNIST`.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise SandmaskError(f"{path} cannot be read ({error}). Delete it and fetch it again.") from error
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != CONTENT_MD5[name]:
        raise SandmaskError(f"{path} does not hold the published MNIST data. Delete it and fetch it again.")
    return content


def load_digits(data_dir: Path | None = None) -> tuple[Tensor, Tensor]:
    """All digits, training files first: images [70000, 28, 28] uint8 and labels [70000] int64."""
    folder = find_mnist(data_dir)
    if folder is None:
        root = data_folder(data_dir)
        raise SandmaskError(
            f"The MNIST files are not in {root / FOLDERS[0]} nor in {root / FOLDERS[1]}. Run `sandmask data "
            f"download MNIST`, or put the four files {', '.join(f'{name}.gz' for name in CONTENT_MD5)} there."
        )
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for name in CONTENT_MD5:
        (images if "images" in name else labels).append(parse_idx(read_content(folder, name)))
    return torch.cat(images), torch.cat(labels).to(torch.int64)


def parse_idx(content: bytes) -> Tensor:
    """The array in a file of MNIST's format: 0, 0, 8 (bytes), number of dimensions, sizes, values."""
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    return torch.from_numpy(values.reshape(shape).copy())


def deal(images: Tensor, labels: Tensor, n_environments: int, draws: RandomState) -> list[tuple[Tensor, Tensor]]:
    """Shuffle, then deal round-robin: environment e gets places e, e + n, e + 2n, ... of the order."""
    order = torch.from_numpy(draws.permutation(len(labels)))
    hands = (order[e::n_environments] for e in range(n_environments))
    return [(images[hand], labels[hand]) for hand in hands]


def _find_file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)
