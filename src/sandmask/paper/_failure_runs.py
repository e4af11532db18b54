"""The runs of Figure 2: what is varied, as specs; stacks of them, trained and kept one by one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sandmask.datasets import DATASETS, load_dataset
from sandmask.paper._product import Report
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.training import Progress, make_spec, stack_key, train_stack

TEST_ENV = 0  # the environment without shortcuts: accuracy there is that of the spiral alone
MOMENTUM, NOISE, SCALE = 0.9, 0.0, 1.0  # what two of the three are while the third is varied

# "Best known hyperparameters of AND-mask on Spirals", which the paper does not print: see docs/paper/figure-2.md.
SHARED = {"batch_size": 128, "mlp_width": 256, "mlp_depth": 3, "weight_decay": 1e-6, "lr": 3e-3}
METHODS: dict[str, dict[str, float]] = {
    "ERM": {},
    "ANDMask": {"tau": 1.0},
    "ANDMask-rescaled": {"tau": 1.0},
    "SANDMask": {"tau": 0.5},
    "SANDMask-released": {"tau": 0.5},
}


@dataclass(frozen=True)
class Design:
    """Which values are tried, and how long."""

    momenta: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9, 0.99)
    noises: tuple[float, ...] = (0.0, 0.025, 0.05, 0.1, 0.2)
    scales: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    seeds: int = 20
    steps: int = 2001
    shapes: tuple[tuple[str, float], ...] = ()

    def specs(self) -> list[RunSpec]:
        """Every run once: the conditions that the three panels share are trained once."""
        conditions = dict.fromkeys(
            [
                *((momentum, NOISE, SCALE) for momentum in self.momenta),
                *((MOMENTUM, noise, SCALE) for noise in self.noises),
                *((MOMENTUM, NOISE, scale) for scale in self.scales),
            ]
        )
        return [
            self._spec(method, *condition, seed)
            for method in METHODS
            for condition in conditions
            for seed in range(self.seeds)
        ]

    def _spec(self, method: str, momentum: float, noise: float, scale: float, seed: int) -> RunSpec:
        spec = make_spec(
            DATASETS["Spirals"],
            method,
            [TEST_ENV],
            steps=self.steps,
            checkpoint_every=max((self.steps - 1) // 10, 1),
            hparams={**SHARED, **METHODS[method], **dict(self.shapes)},
            trial_seed=seed,
            seed=seed,
        )
        hparams = {**spec.hparams, "adam_beta1": momentum}
        return replace(spec, hparams=hparams, options={"noise": noise, "init_scale": scale})


FULL = Design()
QUICK = Design(
    momenta=(0.0, 0.9),
    noises=(0.0, 0.1),
    scales=(0.5, 1.0, 2.0),
    seeds=3,
    steps=61,
    shapes=(("batch_size", 32), ("mlp_width", 32)),
)


def stacks(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """Runs that train as one program on the same data."""
    found: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in specs:
        found.setdefault((stack_key(spec), spec.options["noise"]), []).append(spec)
    return list(found.values())


def train(design: Design, folder: Path, device: torch.device, report: Report) -> list[RunRecord]:
    """All runs of a design. A stack that is done is kept in `folder`, and a started one goes on where it was."""
    todo = stacks(design.specs())
    total = sum(len(specs) * design.steps for specs in todo)
    before, runs = 0, []
    folder.mkdir(parents=True, exist_ok=True)
    for specs in todo:
        runs += _stack(specs, folder, device, report, before, total)
        before += len(specs) * design.steps
    report("done", total, total)
    return runs


def _stack(
    specs: Sequence[RunSpec], folder: Path, device: torch.device, report: Report, before: int, total: int
) -> list[RunRecord]:
    """One stack's records, trained or read."""
    noise = specs[0].options["noise"]
    ids = hashlib.sha256("".join(spec.id for spec in specs).encode()).hexdigest()[:8]
    name = f"{specs[0].algorithm.lower()}-noise-{noise:g}-{ids}"
    archive, checkpoint = folder / f"{name}.records.parquet", folder / f"{name}.safetensors"
    if archive.exists():
        return read_runs(archive)

    def tell(progress: Progress) -> None:
        report(f"{specs[0].algorithm}, noise {noise:g}, {len(specs)} runs", before + len(specs) * progress.done, total)

    records = train_stack(specs, load_dataset("Spirals", noise=noise), device, checkpoint, report=tell)
    write_archive(records, archive)
    checkpoint.unlink(missing_ok=True)
    return records
