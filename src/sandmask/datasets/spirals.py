"""Spirals: two interleaved spirals carry the label in every environment, a signature only within its own.

From "Learning explanations that are hard to vary" (Parascandolo et al., ICLR 2021), as the authors of
SAND-mask generated it: the random draws are theirs, number by number.

That data is one draw of a generator. `Spirals:seed=1` is another one; see `SpiralParameters` for what else can be set.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor

from sandmask.datasets._base import DatasetEntry
from sandmask.datasets._tensor import TensorDataset
from sandmask.errors import SandmaskError
from sandmask.registry import closest

SPECIAL_SEED = 2**32 - 1  # of environment 0


@dataclass(frozen=True)
class SpiralParameters:
    """Parameters of the generator; the defaults give the published data.

    :param seed: which draw; every seed gives fresh spirals and signatures.
    :param environments: how many environments have a signature that gives the label away.
    :param signature: the dimension of the signatures.
    :param examples: the number of examples of each of these environments; environment 0 has twice as many (2,000 in
        the published data).
    :param revolutions: how often each spiral winds around the origin.
    """

    seed: int = 0
    environments: int = 16
    signature: int = 16
    examples: int = 1024
    revolutions: int = 3

    @property
    def name(self) -> str:
        """The name of the dataset, followed by the parameters that differ from the published data."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return ":".join(["Spirals", *(f"{name}={value}" for name, value in changed)])

    @classmethod
    def parse(cls, values: dict[str, str]) -> "SpiralParameters":
        """From texts, such as {"seed": "1"}."""
        names = [f.name for f in fields(cls)]
        for name, value in values.items():
            if name not in names:
                raise SandmaskError(f"Spirals has no parameter {name!r}. {closest(name, names)}")
            least = {"seed": 0, "environments": 2, "examples": 5}.get(name, 1)
            if not value.isdecimal() or not least <= int(value) <= 10**6:
                raise SandmaskError(
                    f"Spirals: parameter {name!r} should be a whole number from {least} to a million. Found {value!r}."
                )
        return cls(**{name: int(value) for name, value in values.items()})

    def random(self, environment: int) -> RandomState:
        """The generator of one environment's draws; with seed 0, that of the published data."""
        own = SPECIAL_SEED if environment == 0 else environment - 1
        return RandomState(own) if self.seed == 0 else RandomState([own, self.seed])


PUBLISHED = SpiralParameters()


def spiral_environment(
    environment: int, noise: float = 0.0, parameters: SpiralParameters = PUBLISHED
) -> tuple[Tensor, Tensor]:
    """Inputs [n, 2 + signature] and labels [n] of one environment: two mechanism dimensions, then the signature.

    Environments 1, 2, ... have signatures that give the label away: the same vector for all examples, with the label's
    sign. Environment 0 has random signatures, so only the spiral predicts the label.

    `noise` is the standard deviation of normal noise added to the two mechanism dimensions, which have unit
    variance. It is drawn last: everything else is the same with and without it.
    """
    special = environment == 0
    n = parameters.examples
    if special:
        n = 2000 if n == PUBLISHED.examples else 2 * n
    draws = parameters.random(environment)
    matrix = draws.standard_normal((parameters.environments, parameters.signature))
    radius = draws.uniform(0.08, 1.0, n)
    label = draws.randint(0, 2, n)
    noisy_radius = radius + draws.uniform(-0.02, 0.02, n)

    angle = 2.0 * math.pi * parameters.revolutions * radius + math.pi * label
    mechanism = noisy_radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    mechanism /= mechanism.std(axis=0)
    if special:
        signature = draws.standard_normal((n, parameters.signature))
    else:
        signature = matrix[environment - 1] * (2 * label - 1)[:, None]
    if noise:
        mechanism += noise * draws.standard_normal((n, 2))
    inputs = np.concatenate([mechanism, signature], axis=1).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(label.astype(np.int64))


def load_spirals(
    parameters: SpiralParameters,
    data_dir: Path | None = None,  # noqa: ARG001 - the data is generated
    *,
    noise: float = 0.0,
) -> TensorDataset:
    """All environments. `noise`: see `spiral_environment`."""
    if not noise >= 0.0:
        raise SandmaskError(f"Spirals: option `noise` should be 0 or more. Found `noise` = {noise}.")
    environments = _environments(parameters)
    parts = [spiral_environment(e, noise, parameters) for e in range(len(environments))]
    return TensorDataset(parameters.name, environments, ("0", "1"), parts)


def _environments(parameters: SpiralParameters) -> tuple[str, ...]:
    return tuple(str(e) for e in range(parameters.environments + 1))


def spirals_variant(values: dict[str, str]) -> DatasetEntry:
    """The entry of data that was generated with these parameters."""
    parameters = SpiralParameters.parse(values)
    if parameters == PUBLISHED:
        return SPIRALS
    return replace(
        SPIRALS,
        name=parameters.name,
        environments=_environments(parameters),
        load=partial(load_spirals, parameters),
        report_envs=tuple(range(parameters.environments)),
        input_shape=(2 + parameters.signature,),
    )


SPIRALS = DatasetEntry(
    name="Spirals",
    description="Two interleaved spirals, with signatures that give the label away in one environment only",
    environments=_environments(PUBLISHED),
    load=partial(load_spirals, PUBLISHED),
    network="mlp",
    scope="tabular",
    recipe_steps=1001,
    checkpoint_every=10,
    report_envs=tuple(range(PUBLISHED.environments)),
    n_classes=2,
    input_shape=(2 + PUBLISHED.signature,),
    variant=spirals_variant,
)
