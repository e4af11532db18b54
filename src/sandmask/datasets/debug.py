"""Tiny generated datasets that any method learns in seconds: for tests, and to try a new algorithm."""

from functools import partial
from pathlib import Path

import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._base import DatasetEntry, HparamScope, TensorDataset

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


def _load(
    name: str,
    shape: tuple[int, ...],
    n_classes: int,
    data_dir: Path | None = None,  # noqa: ARG001 - it is generated
) -> TensorDataset:
    """Three environments of 64 examples."""
    parts = [_environment(e, shape, n_classes) for e in range(len(ENVIRONMENTS))]
    return TensorDataset(name, ENVIRONMENTS, tuple(map(str, range(n_classes))), parts)


def _entry(
    name: str, what: str, shape: tuple[int, ...], n_classes: int, network: str, scope: HparamScope
) -> DatasetEntry:
    return DatasetEntry(
        name=name,
        description=f"Generated {what}, for tests",
        environments=ENVIRONMENTS,
        load=partial(_load, name, shape, n_classes),
        network=network,
        scope=scope,
        steps=61,
        checkpoint_every=20,
        n_classes=n_classes,
        input_shape=shape,
    )


DEBUG_28 = _entry("Debug28", "28 x 28 images", (1, 28, 28), 4, "mnist-convnet", "small-image")
DEBUG_VECTOR = _entry("DebugVector", "vectors", (8,), 2, "mlp", "tabular")
