"""ColoredMNIST: colour predicts the label better than shape does, and the other way round in one environment.

After "Invariant Risk Minimization" (Arjovsky et al., 2019), dealt over environments as DomainBed does.
"""

from pathlib import Path

import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._mnist import SHUFFLE_SEED, SIDE, deal, load_digits
from sandmask.datasets._tensor import TensorDataset

LABEL_NOISE = 0.25
COLOR_NOISE = (0.1, 0.2, 0.9)


def color(digits: Tensor, numbers: Tensor, color_noise: float, draws: RandomState) -> tuple[Tensor, Tensor]:
    """Coloured images [n, 2, 28, 28] uint8 and binary labels [n].

    label = (digit < 5), flipped with probability 0.25; colour = label, flipped with probability
    `color_noise`; the digit is in the channel of its colour and the other channel is zero.
    """
    n = len(numbers)
    flip_label = torch.from_numpy(draws.uniform(size=n) < LABEL_NOISE)
    flip_color = torch.from_numpy(draws.uniform(size=n) < color_noise)
    labels = (numbers < 5) ^ flip_label
    colors = (labels ^ flip_color).long()
    images = torch.zeros(n, 2, SIDE, SIDE, dtype=torch.uint8)
    images[torch.arange(n), colors] = digits
    return images, labels.long()


def load(data_dir: Path | None = None, *, seed: int = SHUFFLE_SEED) -> TensorDataset:
    """Three environments. Shuffle and flips come from `RandomState(seed)`: the shuffle, then for each
    environment in turn its label flips and its colour flips."""
    draws = RandomState(seed)
    hands = deal(*load_digits(data_dir), len(COLOR_NOISE), draws)
    parts = [color(*hand, noise, draws) for hand, noise in zip(hands, COLOR_NOISE, strict=True)]
    return TensorDataset("ColoredMNIST", COLORED_MNIST.environments, ("5-9", "0-4"), parts)


COLORED_MNIST = DatasetEntry(
    name="ColoredMNIST",
    description="Digits below 5 or not, with a colour that correlates with the label: +90%, +80% and -90%",
    environments=("+90%", "+80%", "-90%"),
    load=load,
    network="mnist-convnet",
    scope="small-image",
    checkpoint_every=100,
    n_classes=2,
    input_shape=(2, SIDE, SIDE),
)
