"""RotatedMNIST: ten digits, each environment turned by another angle (Ghifary et al., 2015)."""

import math
from pathlib import Path

import torch
from numpy.random import RandomState
from torch import Tensor
from torch.nn import functional as F

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._mnist import SHUFFLE_SEED, SIDE, deal, load_digits
from sandmask.datasets._tensor import TensorDataset

ANGLES = (0, 15, 30, 45, 60, 75)


def rotate(digits: Tensor, degrees: float) -> Tensor:
    """Turn uint8 images [n, h, w] counter-clockwise: bilinear, zero outside, rounded to uint8."""
    if degrees == 0:
        return digits
    n, height, width = digits.shape
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    # Where each output pixel comes from, in coordinates that run from -1 to 1 along each side.
    source = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(source.expand(1, 2, 3), [1, 1, height, width], align_corners=False)
    # The digits are channels of one picture, so that the grid is worked out once for all.
    turned = F.grid_sample(digits[None].float(), grid, align_corners=False, padding_mode="zeros")
    return turned[0].round_().clamp_(0, 255).to(torch.uint8).reshape(n, height, width)


def load(data_dir: Path | None = None, *, seed: int = SHUFFLE_SEED) -> TensorDataset:
    """Six environments, dealt from digits that `RandomState(seed)` shuffled."""
    hands = deal(*load_digits(data_dir), len(ANGLES), RandomState(seed))
    parts = [
        (rotate(digits, angle).unsqueeze(1), numbers) for (digits, numbers), angle in zip(hands, ANGLES, strict=True)
    ]
    return TensorDataset("RotatedMNIST", ROTATED_MNIST.environments, tuple("0123456789"), parts)


ROTATED_MNIST = DatasetEntry(
    name="RotatedMNIST",
    description="Handwritten digits, turned by another angle in each environment",
    environments=tuple(str(angle) for angle in ANGLES),
    load=load,
    network="mnist-convnet",
    scope="small-image",
    checkpoint_every=100,
    n_classes=10,
    input_shape=(1, SIDE, SIDE),
)
