"""ColoredMNIST and RotatedMNIST: the 70,000 MNIST digits from the four published files, divided as in DomainBed.

- ColoredMNIST ("Invariant Risk Minimization", Arjovsky et al., 2019): the colour predicts the label better than the
  shape. In one environment, it predicts the opposite label.
- RotatedMNIST (Ghifary et al., 2015): ten digits, each environment rotated by a different angle.
"""

import gzip
import hashlib
import math
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor
from torch.nn import functional as F

from sandmask.datasets._base import DatasetEntry, TensorDataset
from sandmask.datasets._scan import data_folder
from sandmask.errors import SandmaskError

SIDE = 28
FOLDERS = ("mnist", "MNIST/raw", "MNIST")  # the second is where torchvision puts them

# md5 of the uncompressed contents, which does not depend on how a copy was compressed.
CONTENT_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def find_mnist(data_dir: Path | None = None) -> Path | None:
    """Return the folder with the four files, gzipped or not, which is one of `FOLDERS` in the data folder; or None."""
    root = data_folder(data_dir)
    for folder in FOLDERS:
        if all(_find_file(root / folder, name) for name in CONTENT_MD5):
            return root / folder
    return None


def read_content(folder: Path, name: str) -> bytes:
    """Return the uncompressed content of a file. Raise an error if it is not the published one."""
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
    """Return all digits, training files first: images [70000, 28, 28] uint8 and labels [70000] int64."""
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
    """Return the array in a file of MNIST's format: 0, 0, 8 (bytes), number of dimensions, sizes, values."""
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    return torch.from_numpy(values.reshape(shape).copy())


def deal(images: Tensor, labels: Tensor, n_environments: int, draws: RandomState) -> list[tuple[Tensor, Tensor]]:
    """Shuffle the digits and divide them: environment e gets positions e, e + n, e + 2n, ... of the random order."""
    order = torch.from_numpy(draws.permutation(len(labels)))
    hands = (order[e::n_environments] for e in range(n_environments))
    return [(images[hand], labels[hand]) for hand in hands]


def _find_file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)


LABEL_NOISE = 0.25
COLOR_NOISE = (0.1, 0.2, 0.9)


def color(digits: Tensor, numbers: Tensor, color_noise: float, draws: RandomState) -> tuple[Tensor, Tensor]:
    """Return coloured images [n, 2, 28, 28] uint8 and binary labels [n].

    The label is 1 for digits below 5, and flipped with probability 0.25. The colour is the label, flipped with
    probability `color_noise`. The digit is in the channel of its colour, and the other channel is zero.
    """
    n = len(numbers)
    flip_label = torch.from_numpy(draws.uniform(size=n) < LABEL_NOISE)
    flip_color = torch.from_numpy(draws.uniform(size=n) < color_noise)
    labels = (numbers < 5) ^ flip_label
    colors = (labels ^ flip_color).long()
    images = torch.zeros(n, 2, SIDE, SIDE, dtype=torch.uint8)
    images[torch.arange(n), colors] = digits
    return images, labels.long()


def load_colored(data_dir: Path | None = None, *, seed: int = 0) -> TensorDataset:
    """Load the three environments of ColoredMNIST.

    `RandomState(seed)` draws the shuffle, and then for each environment the label flips and the colour flips.
    """
    draws = RandomState(seed)
    hands = deal(*load_digits(data_dir), len(COLOR_NOISE), draws)
    parts = [color(*hand, noise, draws) for hand, noise in zip(hands, COLOR_NOISE, strict=True)]
    return TensorDataset("ColoredMNIST", COLORED_MNIST.environments, ("5-9", "0-4"), parts)


COLORED_MNIST = DatasetEntry(
    name="ColoredMNIST",
    description="Digits below 5 or not, with a colour that correlates with the label: +90%, +80% and -90%",
    environments=("+90%", "+80%", "-90%"),
    load=load_colored,
    network="mnist-convnet",
    scope="small-image",
    checkpoint_every=100,
    n_classes=2,
    input_shape=(2, SIDE, SIDE),
)


ANGLES = (0, 15, 30, 45, 60, 75)


def rotate(digits: Tensor, degrees: float) -> Tensor:
    """Rotate uint8 images [n, h, w] counter-clockwise, with bilinear interpolation and zeros outside of the images."""
    if degrees == 0:
        return digits
    n, height, width = digits.shape
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    # Where each output pixel comes from, in coordinates that run from -1 to 1 along each side.
    source = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(source.expand(1, 2, 3), [1, 1, height, width], align_corners=False)
    # The digits are channels of a single image, so that the grid is computed only once.
    turned = F.grid_sample(digits[None].float(), grid, align_corners=False, padding_mode="zeros")
    return turned[0].round_().clamp_(0, 255).to(torch.uint8).reshape(n, height, width)


def load_rotated(data_dir: Path | None = None, *, seed: int = 0) -> TensorDataset:
    """Load the six environments of RotatedMNIST. `RandomState(seed)` shuffles the digits."""
    hands = deal(*load_digits(data_dir), len(ANGLES), RandomState(seed))
    parts = [
        (rotate(digits, angle).unsqueeze(1), numbers) for (digits, numbers), angle in zip(hands, ANGLES, strict=True)
    ]
    return TensorDataset("RotatedMNIST", ROTATED_MNIST.environments, tuple("0123456789"), parts)


ROTATED_MNIST = DatasetEntry(
    name="RotatedMNIST",
    description="Handwritten digits, rotated by a different angle in each environment",
    environments=tuple(str(angle) for angle in ANGLES),
    load=load_rotated,
    network="mnist-convnet",
    scope="small-image",
    checkpoint_every=100,
    n_classes=10,
    input_shape=(1, SIDE, SIDE),
)
