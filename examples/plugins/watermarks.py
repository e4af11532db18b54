"""Watermarks, a dataset plugin: MNIST digits with a watermark that gives the label away, another one in each domain.

The label is whether the digit is below 5. Images have 14 x 14 pixels. The 4 x 4 pixels in a corner of an image are the
watermark: a random pattern of its domain in images with label 0, and the inverse pattern in images with label 1.
`Watermarks-N` has N + 1 domains, so that N remain to train on when one is held out.
"""

from functools import partial
from pathlib import Path

import torch
from numpy.random import RandomState
from torch.nn import functional as F

from sandmask.datasets import DATASETS, DatasetEntry, TensorDataset
from sandmask.datasets.mnist import load_digits

SIZES = (4, 8, 12, 16, 24, 32)
SEED = 1
SIDE = 4  # of a watermark


def load(domains: int, data_dir: Path | None = None) -> TensorDataset:
    """The digits, dealt to `domains` domains of equal size, each with a watermark of its own."""
    digits, classes = load_digits(data_dir)
    draws = RandomState(SEED)
    order = torch.from_numpy(draws.permutation(len(digits)))
    images = F.avg_pool2d(digits[order].float().unsqueeze(1) / 255, 2)
    labels = (classes[order] < 5).long()
    size = len(digits) // domains
    parts = []
    for domain in range(domains):
        x, y = (values[domain * size : (domain + 1) * size].clone() for values in (images, labels))
        pattern = torch.from_numpy(draws.randint(0, 2, (SIDE, SIDE))).float()
        x[:, 0, :SIDE, :SIDE] = torch.where(y[:, None, None] > 0, 1 - pattern, pattern)
        parts.append((x, y))
    return TensorDataset(f"Watermarks-{domains - 1}", names(domains), ("5 to 9", "0 to 4"), parts)


def names(domains: int) -> tuple[str, ...]:
    """The names of the domains: their numbers."""
    return tuple(str(domain) for domain in range(domains))


for trained_on in SIZES:
    DATASETS.register(
        DatasetEntry(
            name=f"Watermarks-{trained_on}",
            description=f"MNIST digits with a different watermark in each of {trained_on + 1} domains",
            environments=names(trained_on + 1),
            load=partial(load, trained_on + 1),
            network="mlp",
            scope="tabular",
            steps=301,
            checkpoint_every=50,
            n_classes=2,
            input_shape=(1, 14, 14),
        )
    )
