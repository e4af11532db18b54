"""Tiny generated datasets that any method learns in seconds: for tests, and to try a new algorithm."""

from pathlib import Path

import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._base import DatasetEntry, TensorDataset

ENVIRONMENTS = ("a", "b", "c")
EXAMPLES = 64


def _environment(number: int, shape: tuple[int, ...], n_classes: int) -> tuple[Tensor, Tensor]:
    """Noise around a pattern of the class, shifted by a pattern of the environment."""
    patterns = RandomState(0).standard_normal((n_classes, *shape))  # shared by all environments
    draws = RandomState(1 + number)
    shift = 0.3 * draws.standard_normal(shape)
    labels = draws.permutation(EXAMPLES) % n_classes
    inputs = patterns[labels] + shift + 0.3 * draws.standard_normal((EXAMPLES, *shape))
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


def load_vector(data_dir: Path | None = None) -> TensorDataset:  # noqa: ARG001 - it is generated
    """Three environments of 64 vectors."""
    parts = [_environment(e, (8,), 2) for e in range(len(ENVIRONMENTS))]
    return TensorDataset("DebugVector", ENVIRONMENTS, ("0", "1"), parts)


def load_28(data_dir: Path | None = None) -> TensorDataset:  # noqa: ARG001 - it is generated
    """Three environments of 64 images."""
    parts = [_environment(e, (1, 28, 28), 4) for e in range(len(ENVIRONMENTS))]
    return TensorDataset("Debug28", ENVIRONMENTS, ("0", "1", "2", "3"), parts)


DEBUG_28 = DatasetEntry(
    name="Debug28",
    description="Generated 28 x 28 images, for tests",
    environments=ENVIRONMENTS,
    load=load_28,
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
    load=load_vector,
    network="mlp",
    scope="tabular",
    steps=61,
    checkpoint_every=20,
    n_classes=2,
    input_shape=(8,),
)
