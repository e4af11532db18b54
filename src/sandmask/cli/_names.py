"""Names of datasets and algorithms checked before torch is imported, so that a misspelled one is refused at once."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from sandmask.cli import _completion
from sandmask.plugins import GROUP, VARIABLE
from sandmask.registry import Registry


@dataclass(frozen=True)
class _Name:
    name: str


def check_names(dataset: str, algorithm: str, plugins: Sequence[Path] | None = None) -> None:
    """Refuse a dataset or an algorithm that does not exist, in the words of its registry.

    With plugins, or once torch is loaded, nothing is checked here: the registries themselves will refuse the name.
    """
    if "torch" in sys.modules or plugins or os.environ.get(VARIABLE) or entry_points(group=GROUP):
        return
    datasets, algorithms = _catalogue("dataset"), _catalogue("algorithm")
    name = _without_parameters(dataset)
    if name not in datasets and not _may_be_folder(dataset):
        datasets[name]
    algorithms[algorithm]


def is_swapped(dataset: str, algorithm: str) -> bool:
    """Whether these are an algorithm and a dataset, in that order: each is the name of the other kind alone."""
    datasets, algorithms = _catalogue("dataset"), _catalogue("algorithm")
    is_dataset, is_algorithm = _without_parameters(algorithm) in datasets, dataset in algorithms
    return is_dataset and is_algorithm and dataset not in datasets and algorithm not in algorithms


def _catalogue(kind: str) -> Registry[_Name]:
    """A registry's names, read without importing it."""
    catalogue: Registry[_Name] = Registry(kind)
    for name in {"dataset": _completion.dataset, "algorithm": _completion.algorithm}[kind](""):
        catalogue.register(_Name(name))
    return catalogue


def _without_parameters(dataset: str) -> str:
    """The registered name of a dataset that may be a variant: "Spirals" of "Spirals:seed=1"."""
    return dataset.partition(":")[0]


def _may_be_folder(dataset: str) -> bool:
    return any(separator in dataset for separator in {"/", os.sep}) or (dataset != "" and Path(dataset).is_dir())
