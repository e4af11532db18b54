"""Train the runs of Figure 2 and of the tiny sweeps of `--quick`, one stack after the other."""

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sandmask.datasets import DATASETS, Dataset, TensorDataset, load_dataset
from sandmask.paper._product import OnProgress
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.training import Progress, make_spec, stack_key, train_stack


def stacks(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """Group runs that train as one program on the same data."""
    found: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in specs:
        found.setdefault((stack_key(spec), *sorted(spec.options.items())), []).append(spec)
    return list(found.values())


def train_runs(
    specs: Sequence[RunSpec],
    load: Callable[[RunSpec], Dataset],
    folder: Path,
    device: torch.device,
    on_progress: OnProgress,
) -> list[RunRecord]:
    """Train all runs and return their records. A rerun with the same folder resumes.

    `load` returns the data of a run from its spec. `on_progress` receives the number of steps of all runs together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(spec.steps for spec in specs)
    runs: list[RunRecord] = []
    before = 0
    for stack in stacks(specs):
        first = stack[0]
        options = "-".join(f"{name}-{value:g}" for name, value in first.options.items())
        ids = hashlib.sha256("".join(spec.id for spec in stack).encode()).hexdigest()[:8]
        name = f"{first.algorithm.lower()}-{options}-{ids}"
        archive, checkpoint = folder / f"{name}.records.parquet", folder / f"{name}.safetensors"
        if not archive.exists():
            task = f"{first.algorithm} on {first.dataset}, {options}, {len(stack)} runs"
            on_progress(task, before, total)

            def tell(progress: Progress, task: str = task, before: int = before, count: int = len(stack)) -> None:
                on_progress(task, before + count * progress.done, total)

            records = train_stack(stack, load(first), device, checkpoint, on_progress=tell, weights="none")
            write_archive(records, archive)
            checkpoint.unlink(missing_ok=True)
        runs += read_runs(archive)
        before += sum(spec.steps for spec in stack)
    return runs


@dataclass(frozen=True)
class TinySweep:
    """A sweep with few steps and draws on part of the data, only to try a command. Its numbers mean nothing."""

    dataset: str
    algorithms: tuple[str, ...]
    test_envs: tuple[int, ...]
    steps: int
    examples: int  # per environment
    hparams: Mapping[str, int]
    draws: int = 2
    trials: int = 2
    network: str | None = None  # the network of the dataset, if None
    load: Mapping[str, int] = field(default_factory=dict)  # options of the dataset

    def specs(self) -> list[RunSpec]:
        """Return the specs of all runs. The option `examples` separates them from real runs in reports."""
        entry = DATASETS[self.dataset]
        return [
            replace(
                make_spec(
                    entry,
                    algorithm,
                    [env],
                    steps=self.steps,
                    checkpoint_every=max(self.steps // 3, 1),
                    hparams=self.hparams,
                    hparams_seed=draw,
                    trial_seed=trial,
                    seed=trial,
                    space="paper",
                    network=self.network,
                    weights="none",
                ),
                options={"examples": self.examples},
            )
            for algorithm in self.algorithms
            for env in self.test_envs
            for trial in range(self.trials)
            for draw in range(1, self.draws + 1)  # not draw 0: with the defaults, the SAND-mask does not train
        ]

    def data(self, data_dir: Path | None) -> TensorDataset:
        """Load some examples of the dataset."""
        return some_examples(load_dataset(self.dataset, data_dir, **self.load), self.examples)


SPIRALS = TinySweep(
    "Spirals",
    ("ERM", "ANDMask", "SANDMask"),
    (0, 1),
    steps=60,
    examples=200,
    hparams={"batch_size": 16, "mlp_width": 32, "mlp_depth": 3},
)
MNIST = tuple(
    TinySweep(name, ("ERM", "SANDMask"), envs, steps=3, examples=24, hparams={"batch_size": 8}, draws=1)
    for name, envs in (("ColoredMNIST", (0, 2)), ("RotatedMNIST", (0,)))
)
PACS = TinySweep(
    "PACS",
    ("ERM", "SANDMask"),
    (0, 1, 2, 3),
    steps=3,
    examples=28,
    hparams={"batch_size": 4},
    draws=1,
    network="test_resnet",
    load={"image_size": 64},
)
TINY: dict[str, tuple[TinySweep, ...]] = {  # by the name of the table
    "table-1": MNIST,
    "table-2": MNIST,
    "table-3": (SPIRALS,),
    "table-pacs": (PACS,),
}


def some_examples(dataset: Dataset, count: int) -> TensorDataset:
    """Take some examples of every environment, evenly spaced, because folders of images are sorted by class."""
    parts = []
    for begin, end in itertools.pairwise(dataset.bounds):
        numbers = torch.linspace(begin, end - 1, min(count, end - begin)).long()
        parts.append((dataset.inputs(numbers), dataset.labels[numbers]))
    return TensorDataset(dataset.name, dataset.environments, dataset.classes, parts)


def run_tiny(
    sweeps: Sequence[TinySweep], device: torch.device, data_dir: Path | None, on_progress: OnProgress
) -> list[RunRecord]:
    """Train the runs of tiny sweeps and return their records."""
    specs = [spec for sweep in sweeps for spec in sweep.specs()]
    data = {sweep.dataset: sweep.data(data_dir) for sweep in sweeps}
    with tempfile.TemporaryDirectory() as folder:
        return train_runs(specs, lambda spec: data[spec.dataset], Path(folder), device, on_progress)
