"""Metrics beyond accuracy: their definitions, and how records store them.

A run that was trained with `metrics=["f1", "confusion"]` has, at each evaluation, a macro-F1 for every environment's
"in" and "out" split, as curves named `f1/in/0`, and the counts of its confusion matrices in `tables`. Metrics are not
part of a run's spec, so they do not change its id.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from sandmask.records._types import RunRecord
from sandmask.registry import Registry

SPLITS = ("in", "out")
PER_CLASS, CONFUSION = "per-class", "confusion"


@dataclass(frozen=True)
class Measure:
    """A metric: a number for each environment and split, or (`is_table`) counts for each class."""

    name: str
    title: str
    description: str
    is_table: bool = False
    lower_is_better: bool = False

    def entries(self, n_envs: int) -> list[str]:
        """Return the names of the curves of a metric that is a number, in order."""
        return [f"{self.name}/{split}/{env}" for split in SPLITS for env in range(n_envs)]

    def shape(self, n_envs: int, n_classes: int) -> tuple[int, ...]:
        """Return the shape of its values at one evaluation: splits, environments, and the dimensions of a table."""
        own = {PER_CLASS: (n_classes, 2), CONFUSION: (n_classes, n_classes)}.get(self.name, ())
        return (len(SPLITS), n_envs, *own)

    def size(self, n_envs: int, n_classes: int) -> int:
        """Return the number of its values at one evaluation."""
        return prod(self.shape(n_envs, n_classes))


MEASURES: Registry[Measure] = Registry("metric")
MEASURES.register(Measure("f1", "Macro-F1", "mean over classes of the F1 score, in percent"))
MEASURES.register(
    Measure("ece", "Calibration error", "expected calibration error, 15 bins, in percent", lower_is_better=True)
)
MEASURES.register(Measure("worst-group", "Worst group", "lowest accuracy of a class within an environment, in percent"))
MEASURES.register(Measure(PER_CLASS, "Per-class accuracy", "accuracy on the examples of each class", is_table=True))
MEASURES.register(Measure(CONFUSION, "Confusion", "counts of true and predicted classes", is_table=True))
CURVE = re.compile(rf"({'|'.join(MEASURES)})/(?P<split>{'|'.join(SPLITS)})/(?P<env>\d+)")  # the names of `entries`


def table_size(name: str, n_envs: int, n_classes: int) -> int:
    """Return the number of counts in a table at one evaluation. The prefix of an average in its name is ignored."""
    measure = name.rpartition("/")[2]
    if measure not in MEASURES or not MEASURES[measure].is_table:
        raise ValueError(f"there is no table {name!r}")
    return MEASURES[measure].size(n_envs, n_classes)


def parse_measures(names: Iterable[str]) -> tuple[str, ...]:
    """Check names of metrics and return them in the order of `MEASURES`.

    :param names: names of metrics; "all" means every metric.
    """
    asked = list(names)
    found = set(MEASURES) if "all" in asked else {MEASURES[name].name for name in asked}
    return tuple(name for name in MEASURES if name in found)


def measured(run: RunRecord, name: str, split: str) -> NDArray[np.float64] | None:
    """Return the values [T, environments] of a metric that is a number; None if the run did not record it.

    :param run: record of a run.
    :param name: name of the metric.
    :param split: "in" or "out".
    """
    curves = [run.metrics.get(f"{name}/{split}/{env}") for env in range(len(run.env_names))]
    present = [curve for curve in curves if curve is not None]
    return np.stack(present, axis=1) if present and len(present) == len(curves) else None


def class_counts(run: RunRecord) -> NDArray[np.int64] | None:
    """Return the numbers of correct predictions and examples of each class, [T, splits, environments, classes, 2].

    They are computed from confusion matrices if the run recorded only those.

    :param run: record of a run.
    :return: the counts; None if they were not recorded.
    """
    shape = (len(run.steps), *MEASURES[PER_CLASS].shape(len(run.env_names), len(run.classes)))
    if PER_CLASS in run.tables:
        return run.tables[PER_CLASS].reshape(shape)
    counts = confusion_counts(run)
    return None if counts is None else np.stack([counts.diagonal(axis1=-2, axis2=-1), counts.sum(-1)], axis=-1)


def confusion_counts(run: RunRecord) -> NDArray[np.int64] | None:
    """Return confusion matrices: counts by true and predicted class, [T, splits, environments, classes, classes].

    :param run: record of a run.
    :return: the counts; None if they were not recorded.
    """
    if CONFUSION not in run.tables:
        return None
    return run.tables[CONFUSION].reshape(
        len(run.steps), *MEASURES[CONFUSION].shape(len(run.env_names), len(run.classes))
    )


def recorded_measures(runs: Iterable[RunRecord]) -> list[str]:
    """Return the metrics that any of these runs recorded, in the order of `MEASURES`.

    :param runs: records of the runs.
    """
    entries = {f"{name}/{SPLITS[0]}/0": name for name in MEASURES}
    found: set[str] = set()
    for run in runs:
        found.update(entries[entry] for entry in entries if entry in run.metrics)
        found.update(run.tables)
    return [name for name in MEASURES if name in found]
