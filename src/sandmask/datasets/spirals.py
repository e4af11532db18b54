"""Spirals: two interleaved spirals predict the label in all environments, and signatures do in one environment each.

The dataset is from "Learning explanations that are hard to vary" (Parascandolo et al., ICLR 2021), as the authors of
SAND-mask generated it, with the same random numbers.

This is one draw of a generator, and `Spirals:seed=1` is another one. `SpiralParameters` has the other parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from sandmask._files import replacing
from sandmask.datasets._base import Dataset, DatasetEntry, TensorDataset
from sandmask.errors import SandmaskError
from sandmask.registry import closest

SPECIAL_SEED = 2**32 - 1  # seed of environment 0


@dataclass(frozen=True)
class SpiralParameters:
    """Parameters of the generator; the defaults give the published data.

    :param seed: number of the draw; every seed gives new spirals and signatures.
    :param environments: number of environments with a signature that predicts the label. Environment 0 is not counted.
    :param signature: dimension of the signatures.
    :param examples: number of examples of each of these environments; environment 0 has twice as many (2,000 in the
        published data).
    :param revolutions: number of revolutions of each spiral around the origin.
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
        """Return parameters from texts, such as {"seed": "1"}."""
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
        """Return the random generator of one environment; with seed 0, the generator of the published data."""
        own = SPECIAL_SEED if environment == 0 else environment - 1
        return RandomState(own) if self.seed == 0 else RandomState([own, self.seed])


PUBLISHED = SpiralParameters()


def spiral_environment(
    environment: int, noise: float = 0.0, parameters: SpiralParameters = PUBLISHED
) -> tuple[Tensor, Tensor]:
    """Generate inputs [n, 2 + signature] and labels [n] of one environment.

    Inputs have two mechanism dimensions, which are the position on a spiral, followed by the signature. In environments
    1, 2, ..., the signature predicts the label: it is the same vector for all examples, multiplied by 1 or -1 depending
    on the label. Environment 0 has random signatures, so only the spiral predicts the label.

    `noise` is the standard deviation of normal noise that is added to the two mechanism dimensions, which have unit
    variance. It is drawn last, so that everything else is the same with and without noise.
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
    """Generate all environments. See `spiral_environment` for `noise`."""
    if not noise >= 0.0:
        raise SandmaskError(f"Spirals: option `noise` should be 0 or more. Found `noise` = {noise}.")
    environments = _environments(parameters)
    parts = [spiral_environment(e, noise, parameters) for e in range(len(environments))]
    return TensorDataset(parameters.name, environments, ("0", "1"), parts)


def _environments(parameters: SpiralParameters) -> tuple[str, ...]:
    return tuple(str(e) for e in range(parameters.environments + 1))


def spirals_variant(values: dict[str, str]) -> DatasetEntry:
    """Return the registry entry of data that is generated with these parameters."""
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
    description="Two interleaved spirals, with signatures that each predict the label in one environment only",
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


REACH, POINTS = 2.3, 220  # figures show the plane from -2.3 to 2.3, with 220 points in each direction


class SpiralPanel(NamedTuple):
    """The panel of a method: title, probability of class 1 over the plane, and accuracy on the held-out domain."""

    title: str
    probability: NDArray[np.float32]  # [POINTS, POINTS]
    accuracy: float


@torch.no_grad()
def spiral_panel(title: str, predict: Callable[[Tensor], Tensor], n_inputs: int, accuracy: float) -> SpiralPanel:
    """Compute a network's prediction at every point of the plane, with the signature at its mean, zero.

    :param title: title of the panel.
    :param predict: a function from inputs [n, n_inputs] to probabilities [n, 2].
    :param n_inputs: number of inputs of the network.
    :param accuracy: accuracy on the held-out domain.
    """
    axis = torch.linspace(-REACH, REACH, POINTS)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    plane = torch.zeros(POINTS * POINTS, n_inputs)
    plane[:, 0], plane[:, 1] = x.flatten(), y.flatten()
    probability = predict(plane)[:, 1]
    return SpiralPanel(title, probability.cpu().numpy().reshape(POINTS, POINTS), accuracy)


def draw_spirals(panels: Sequence[SpiralPanel], dataset: Dataset, path: Path) -> None:
    """Draw panels side by side, with some examples of environment 0, which has no predictive signature."""
    from matplotlib.figure import Figure

    examples = torch.arange(dataset.bounds[0], min(dataset.bounds[0] + 600, dataset.bounds[1]))
    points, labels = dataset.inputs(examples).cpu().numpy(), dataset.labels[examples].cpu().numpy()
    figure = Figure(figsize=(4 * len(panels), 4.4), layout="constrained")
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        extent = (-REACH, REACH, -REACH, REACH)
        axes.imshow(panel.probability, origin="lower", extent=extent, cmap="RdBu_r", vmin=0, vmax=1, alpha=0.75)
        for label, color in ((0, "#1b4f8a"), (1, "#a4222c")):
            mine = points[labels == label]
            axes.scatter(mine[:, 0], mine[:, 1], s=6, color=color, edgecolors="white", linewidths=0.2)
        axes.set_title(f"{panel.title}\n{panel.accuracy:.0%} on the unseen domain", fontsize=13)
        axes.set(xticks=[], yticks=[], xlim=(-REACH, REACH), ylim=(-REACH, REACH))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=110, bbox_inches="tight")
