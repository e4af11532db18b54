"""Tiny generated datasets for tests and for new algorithms. Every method learns them in seconds."""

from functools import partial
from pathlib import Path

import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._base import DatasetEntry, TensorDataset

ENVIRONMENTS = ("a", "b", "c")
EXAMPLES = 64


def _environment(number: int, shape: tuple[int, ...], n_classes: int) -> tuple[Tensor, Tensor]:
    """Generate examples: a pattern of the class, plus a shift of the environment, plus noise."""
    patterns = RandomState(0).standard_normal((n_classes, *shape))  # shared by all environments
    draws = RandomState(1 + number)
    shift = 0.3 * draws.standard_normal(shape)
    labels = draws.permutation(EXAMPLES) % n_classes
    inputs = patterns[labels] + shift + 0.3 * draws.standard_normal((EXAMPLES, *shape))
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


def _load(
    name: str,
    shape: tuple[int, ...],
    n_classes: int,
    data_dir: Path | None = None,  # noqa: ARG001 - it is generated
) -> TensorDataset:
    """Generate three environments of 64 examples."""
    parts = [_environment(e, shape, n_classes) for e in range(len(ENVIRONMENTS))]
    return TensorDataset(name, ENVIRONMENTS, tuple(map(str, range(n_classes))), parts)


DEBUG_28 = DatasetEntry(
    name="Debug28",
    description="Generated 28 x 28 images, for tests",
    environments=ENVIRONMENTS,
    load=partial(_load, "Debug28", (1, 28, 28), 4),
    network="mnist-convnet",
    scope="small-image",
    steps=61,
    checkpoint_every=20,
    n_classes=4,
    input_shape=(1, 28, 28),
)
DEBUG_VECTOR = DatasetEntry(
    name="DebugVector",
    description="Generated vectors, for tests",
    environments=ENVIRONMENTS,
    load=partial(_load, "DebugVector", (8,), 2),
    network="mlp",
    scope="tabular",
    steps=61,
    checkpoint_every=20,
    n_classes=2,
    input_shape=(8,),
)
