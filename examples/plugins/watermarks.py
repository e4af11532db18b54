"""Watermarks, a dataset plugin: MNIST digits with a watermark that gives the label away, another one in each domain.

The label is whether the digit is below 5. Images have 14 x 14 pixels. The 4 x 4 pixels in a corner of an image are the
watermark: a random pattern of its domain in images with label 0, and the inverse pattern in images with label 1.
`Watermarks-N` has N + 1 domains, so that N remain to train on when one is held out. `Unmarked-16` is `Watermarks-16`
without watermarks, which shows how well the shape alone predicts the label.
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


def load(name: str, side: int, data_dir: Path | None = None) -> TensorDataset:
    """The digits, dealt to domains of equal size, each with a watermark of its own of `side` x `side` pixels."""
    domains = len(names(name))
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
        x[:, 0, :side, :side] = torch.where(y[:, None, None] > 0, 1 - pattern, pattern)[:, :side, :side]
        parts.append((x, y))
    return TensorDataset(name, names(name), ("5 to 9", "0 to 4"), parts)


def names(dataset: str) -> tuple[str, ...]:
    """The names of the domains: their numbers."""
    return tuple(map(str, range(int(dataset.rpartition("-")[2]) + 1)))


DESCRIPTIONS = {f"Watermarks-{n}": f"MNIST digits with a different watermark in each of {n + 1} domains" for n in SIZES}
for name, description in {**DESCRIPTIONS, "Unmarked-16": "The digits of Watermarks-16 without watermarks"}.items():
    DATASETS.register(
        DatasetEntry(
            name=name,
            description=description,
            environments=names(name),
            load=partial(load, name, SIDE if name in DESCRIPTIONS else 0),
            network="mlp",
            scope="tabular",
            steps=301,
            checkpoint_every=50,
            n_classes=2,
            input_shape=(1, 14, 14),
        )
    )
