"""Spirals: two interleaved spirals carry the label in every environment, a signature only within its own.

From "Learning explanations that are hard to vary" (Parascandolo et al., ICLR 2021), as the authors of
SAND-mask generated it: the random draws are theirs, number by number.
"""

import math
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._tensor import TensorDataset
from sandmask.errors import SandmaskError

N_SIGNATURES = 16
REVOLUTIONS = 3
EXAMPLES = 1024
SPECIAL_EXAMPLES = 2000
SPECIAL_SEED = 2**32 - 1


def spiral_environment(environment: int, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Inputs [n, 18] and labels [n] of one environment: two mechanism dimensions, then sixteen of signature.

    Environments 1..16 have 1,024 examples each, whose signature gives the label away: the same vector, with
    the label's sign. Environment 0 has 2,000 examples with random signatures, so that only the spiral tells.

    `noise` is the standard deviation of normal noise added to the two mechanism dimensions, which have unit
    variance. It is drawn last: everything else is the same with and without it.
    """
    special = environment == 0
    n = SPECIAL_EXAMPLES if special else EXAMPLES
    draws = RandomState(SPECIAL_SEED if special else environment - 1)
    matrix = draws.standard_normal((N_SIGNATURES, N_SIGNATURES))
    radius = draws.uniform(0.08, 1.0, n)
    label = draws.randint(0, 2, n)
    noisy_radius = radius + draws.uniform(-0.02, 0.02, n)

    angle = 2.0 * math.pi * REVOLUTIONS * radius + math.pi * label
    mechanism = noisy_radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    mechanism /= mechanism.std(axis=0)
    if special:
        signature = draws.standard_normal((n, N_SIGNATURES))
    else:
        signature = matrix[environment - 1] * (2 * label - 1)[:, None]
    if noise:
        mechanism += noise * draws.standard_normal((n, 2))
    inputs = np.concatenate([mechanism, signature], axis=1).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(label.astype(np.int64))


def load(data_dir: Path | None = None, *, noise: float = 0.0) -> TensorDataset:  # noqa: ARG001 - generated
    """All 17 environments. `noise`: see `spiral_environment`."""
    if not noise >= 0.0:
        raise SandmaskError(f"Spirals: option `noise` should be 0 or more. Found `noise` = {noise}.")
    environments = SPIRALS.environments
    parts = [spiral_environment(e, noise) for e in range(len(environments))]
    return TensorDataset("Spirals", environments, ("0", "1"), parts)


SPIRALS = DatasetEntry(
    name="Spirals",
    description="Two interleaved spirals, with signatures that give the label away in one environment only",
    environments=tuple(str(e) for e in range(N_SIGNATURES + 1)),
    load=load,
    network="mlp",
    scope="spirals",
    checkpoint_every=10,
    report_envs=tuple(range(N_SIGNATURES)),
    n_classes=2,
    input_shape=(2 + N_SIGNATURES,),
)
