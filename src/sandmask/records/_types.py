"""Specs and records of runs, and the environments that the benchmark holds out."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
Status = Literal["running", "done", "diverged", "pruned"]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # numbers of examples: "in" and "out" splits of the environments
T = TypeVar("T")


@dataclass(frozen=True)
class RunSpec:
    """The complete description of a run. Two runs with equal specs are the same run.

    `hparams` is the complete, resolved configuration, not only what was overridden.
    """

    dataset: str
    algorithm: str
    test_envs: tuple[int, ...]
    steps: int
    checkpoint_every: int
    hparams: dict[str, float]
    hparams_seed: int = 0
    trial_seed: int = 0
    seed: int = 0
    space: str = "paper"
    network: str = "default"
    weights: str = "none"
    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """The id of the run: a hash of the spec, which is the same on every machine."""
        # `asdict` would copy every value, which is slow for the tens of thousands of specs of a sweep. `to_json` would
        # fail for the spec of a damaged file, whose id is compared before its fields are checked.
        content = json.dumps({one.name: getattr(self, one.name) for one in fields(self)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def folder_name(self) -> str:
        """The default name of the run's folder: `Spirals-ERM-<id>`."""
        return f"{PurePath(self.dataset).name}-{self.algorithm}-{self.id}"

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain JSON values."""
        # The deep copies of `asdict` would take ten times as long, and a sweep has thousands of specs.
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        copied = {"hparams": dict(self.hparams), "options": dict(self.options)}
        return {**plain, **copied, "test_envs": list(self.test_envs)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RunSpec":
        """The inverse of `to_json`."""
        return cls(**{**data, "test_envs": tuple(data["test_envs"])})


@dataclass(frozen=True)
class RunRecord:
    """The evaluations of a run: accuracies on every environment's "in" and "out" split at T checkpoints.

    Environments, including held-out ones, are numbered as in the dataset. If training met a NaN or inf, `status` is
    "diverged", `diverged_at` is the step, and the evaluations before that step are kept. If a search stopped the run
    after its last evaluation, `status` is "pruned". `classes` is empty if the source does not name them. `tables` are
    counts for each class, if they were requested: see `class_counts` and `confusion_counts`.

    `sizes` are the numbers of examples in the "in" and "out" splits that were evaluated, and each accuracy is a count
    divided by one of them. They are None if the source does not state them. Archives of sandmask 0.1 derived them from
    the accuracies, so they may be other numbers that give the same accuracies.
    """

    spec: RunSpec
    env_names: tuple[str, ...]
    steps: NDArray[np.int64] = field(repr=False)  # [T]
    accuracy_in: NDArray[np.float64] = field(repr=False)  # [T, environments], in 0..1
    accuracy_out: NDArray[np.float64] = field(repr=False)  # [T, environments], in 0..1
    metrics: dict[str, NDArray[np.float64]] = field(repr=False)  # name -> [T], such as "loss"
    status: Status
    diverged_at: int | None = None
    classes: tuple[str, ...] = ()
    tables: dict[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)  # name -> [T, numbers]
    sizes: Sizes | None = field(default=None, repr=False)

    @property
    def train_envs(self) -> tuple[int, ...]:
        """The environments that the run trained on."""
        return tuple(e for e in range(len(self.env_names)) if e not in self.spec.test_envs)

    def at(self, checkpoints: NDArray[Any] | slice) -> "RunRecord":
        """Return the run with some of its checkpoints.

        :param checkpoints: indices, a mask, or a slice.
        """
        return replace(
            self,
            steps=self.steps[checkpoints],
            accuracy_in=self.accuracy_in[checkpoints],
            accuracy_out=self.accuracy_out[checkpoints],
            metrics={name: curve[checkpoints] for name, curve in self.metrics.items()},
            tables={name: counts[checkpoints] for name, counts in self.tables.items()},
        )


def extent(run: RunRecord) -> tuple[int, bool, int]:
    """Return a sort key for how much a record contains: checkpoints, whether the run has ended, evaluated examples."""
    return len(run.steps), run.status != "running", sum(run.sizes[0]) if run.sizes else 0


def joined(shorter: RunRecord, longer: RunRecord) -> RunRecord:
    """Merge two records of a run, given in the order of their `extent`.

    The result is the longer one. If both have equally many checkpoints, it also has what only the shorter one recorded,
    such as metrics that were requested later.
    """
    if len(shorter.steps) < len(longer.steps):
        return longer
    metrics, tables = shorter.metrics | longer.metrics, shorter.tables | longer.tables
    return replace(longer, metrics=metrics, tables=tables, sizes=longer.sizes or shorter.sizes)


# The environments that the benchmark holds out, by dataset, in the order of the tables. Spirals has one more. The
# registry of datasets has these names too, but importing it imports torch. A test compares the two.
HELD_OUT: dict[str, tuple[str, ...]] = {
    "Spirals": tuple(map(str, range(16))),
    "ColoredMNIST": ("+90%", "+80%", "-90%"),
    "RotatedMNIST": ("0", "15", "30", "45", "60", "75"),
    "VLCS": ("C", "L", "S", "V"),
    "PACS": ("A", "C", "P", "S"),
    "OfficeHome": ("A", "C", "P", "R"),
    "TerraIncognita": ("L100", "L38", "L43", "L46"),
    "DomainNet": ("clip", "info", "paint", "quick", "real", "sketch"),
}


def held_out_environments(dataset: str) -> tuple[str, ...]:
    """Return the environments of a dataset that the benchmark holds out; empty if it does not use the dataset.

    `Spirals:seed=1` has the environments of Spirals.
    """
    return HELD_OUT.get(dataset.partition(":")[0], ())


def dataset_order(names: list[str]) -> list[str]:
    """Sort datasets for tables: the benchmark's in its order, then others by name, with numbers in numeric order.

    >>> dataset_order(["Watermarks-16", "Watermarks-4", "PACS", "Spirals"])
    ['Spirals', 'PACS', 'Watermarks-4', 'Watermarks-16']
    """
    places = {name: place for place, name in enumerate(HELD_OUT)}

    def key(name: str) -> tuple[Any, ...]:
        parts = [(int(part), part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
        return places.get(name, len(places)), parts

    return sorted(names, key=key)


def word_of(value: Any) -> str:
    """Format the value of an option or hyperparameter."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def under_prefix(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    """Return the entries whose names begin with `prefix`, and remove it from the names."""
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
