"""A tiny sweep, to see a table within a minute. Its numbers mean nothing: few steps, few draws, part of the data."""

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sandmask.datasets import DATASETS, Dataset, TensorDataset, load_dataset
from sandmask.paper._failure_runs import train_runs
from sandmask.paper._product import Report, silent
from sandmask.records import RunRecord, RunSpec
from sandmask.training import make_spec

SCRATCH = "none"  # no pretrained weights


@dataclass(frozen=True)
class TinySweep:
    """A small sweep for a quick table."""

    dataset: str
    algorithms: tuple[str, ...]
    test_envs: tuple[int, ...]
    steps: int
    examples: int  # of every environment
    draws: int = 2
    trials: int = 2
    shapes: tuple[tuple[str, int], ...] = ()  # hyperparameters that are set small
    network: str | None = None  # from scratch, instead of the protocol's
    load: tuple[tuple[str, int], ...] = ()  # the dataset's own options

    def specs(self) -> list[RunSpec]:
        """Every run; an option marks them, so that they never mix with real ones."""
        entry = DATASETS[self.dataset]
        return [
            replace(
                make_spec(
                    entry,
                    algorithm,
                    [env],
                    steps=self.steps,
                    checkpoint_every=max(self.steps // 3, 1),
                    hparams=dict(self.shapes),
                    hparams_seed=draw,
                    trial_seed=trial,
                    seed=trial,
                    space="paper",
                    network=self.network,
                    weights=SCRATCH,
                ),
                options={"examples": self.examples},
            )
            for algorithm in self.algorithms
            for env in self.test_envs
            for trial in range(self.trials)
            for draw in range(1, self.draws + 1)  # not the defaults, with which the SAND-mask trains nothing
        ]

    def data(self, data_dir: Path | None) -> TensorDataset:
        """The examples."""
        return some_examples(load_dataset(self.dataset, data_dir, **dict(self.load)), self.examples)


SPIRALS = TinySweep(
    "Spirals",
    ("ERM", "ANDMask", "SANDMask"),
    (0, 1),
    60,
    200,
    shapes=(("batch_size", 16), ("mlp_width", 32), ("mlp_depth", 3)),
)
MNIST = tuple(
    TinySweep(name, ("ERM", "SANDMask"), envs, 3, 24, draws=1, trials=2, shapes=(("batch_size", 8),))
    for name, envs in (("ColoredMNIST", (0, 2)), ("RotatedMNIST", (0,)))
)


PACS = TinySweep(
    "PACS",
    ("ERM", "SANDMask"),
    (0, 1, 2, 3),
    3,
    28,
    draws=1,
    shapes=(("batch_size", 4),),
    network="test_resnet",
    load=(("image_size", 64),),
)


def some_examples(dataset: Dataset, count: int) -> TensorDataset:
    """Some examples of every environment, evenly spaced: folders of images are sorted by class."""
    parts = []
    for begin, end in itertools.pairwise(dataset.bounds):
        numbers = torch.linspace(begin, end - 1, min(count, end - begin)).long()
        parts.append((dataset.inputs(numbers), dataset.labels[numbers]))
    return TensorDataset(dataset.name, dataset.environments, dataset.classes, parts)


def run_tiny(
    sweeps: Sequence[TinySweep], device: torch.device, data_dir: Path | None = None, report: Report = silent
) -> list[RunRecord]:
    """Train the runs of tiny sweeps, stacked, and return their records."""
    specs = [spec for sweep in sweeps for spec in sweep.specs()]
    data = {sweep.dataset: sweep.data(data_dir) for sweep in sweeps}
    with tempfile.TemporaryDirectory() as folder:
        return train_runs(
            specs,
            lambda spec: spec.dataset,
            lambda spec: data[spec.dataset],
            Path(folder),
            device,
            report,
            weights=SCRATCH,
        )
