"""The runs of Figure 2: a search for hyperparameters, then the runs of its three panels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sandmask.datasets import DATASETS, load_dataset
from sandmask.paper._product import OnProgress
from sandmask.paper._train import train_runs
from sandmask.records import RunRecord, RunSpec
from sandmask.training import make_spec

TEST_ENV = 0  # the environment without shortcuts, where only the spiral predicts the label
MOMENTUM, NOISE, SCALE = 0.9, 0.0, 1.0  # values in the panels that vary another one
METHODS = ("ERM", "ANDMask", "ANDMask-rescaled", "SANDMask", "SANDMask-released")
VARIED = ("adam_beta1", "init_scale")  # hyperparameters that the figure sets
SHAPES = (("batch_size", 128), ("mlp_width", 256), ("mlp_depth", 3), ("dropout", 0))
SEARCH_SEED = 1000  # the first seed of the search; those of the figure are lower

Settings = dict[str, dict[str, float]]  # hyperparameters by method


@dataclass(frozen=True)
class Design:
    """The values, seeds and steps of the figure, and the draws of the search."""

    momenta: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9, 0.99)
    noises: tuple[float, ...] = (0.0, 0.025, 0.05, 0.1, 0.2)
    scales: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    seeds: int = 20
    steps: int = 3001
    draws: int = 32
    search_seeds: int = 2
    precision: str = "fp32"
    shapes: tuple[tuple[str, float], ...] = SHAPES

    def search(self) -> list[RunSpec]:
        """Return random draws from the paper's space, to find the "best known hyperparameters" of every method."""
        return [
            self._spec(method, {}, (MOMENTUM, NOISE, SCALE), SEARCH_SEED + seed, draw=draw)
            for method in METHODS
            for draw in range(self.draws)
            for seed in range(self.search_seeds)
        ]

    def specs(self, settings: Settings) -> list[RunSpec]:
        """Return the runs of the figure. A run that several panels share is listed once."""
        conditions = dict.fromkeys(
            [
                *((momentum, NOISE, SCALE) for momentum in self.momenta),
                *((MOMENTUM, noise, SCALE) for noise in self.noises),
                *((MOMENTUM, NOISE, scale) for scale in self.scales),
            ]
        )
        return [
            self._spec(method, settings[method], condition, seed)
            for method in METHODS
            for condition in conditions
            for seed in range(self.seeds)
        ]

    def _spec(
        self, method: str, chosen: dict[str, float], condition: tuple[float, float, float], seed: int, draw: int = 0
    ) -> RunSpec:
        momentum, noise, scale = condition
        spec = make_spec(
            DATASETS["Spirals"],
            method,
            [TEST_ENV],
            steps=self.steps,
            checkpoint_every=max((self.steps - 1) // 10, 1),
            hparams={**chosen, **dict(self.shapes), "adam_beta1": momentum, "init_scale": scale},
            hparams_seed=draw,
            trial_seed=0 if seed >= SEARCH_SEED else seed,  # draws depend on it
            seed=seed,
            space="paper",
            precision=self.precision,
        )
        return replace(spec, options={"noise": noise})


FULL = Design()
QUICK = Design(
    momenta=(0.0, 0.9),
    noises=(0.0, 0.1),
    scales=(0.5, 1.0, 2.0),
    seeds=3,
    steps=41,
    draws=4,
    search_seeds=1,
    shapes=(("batch_size", 32), ("mlp_width", 32), ("mlp_depth", 3), ("dropout", 0)),
)


def is_search(run: RunRecord) -> bool:
    """Whether a run belongs to the search and not to the figure."""
    return run.spec.seed >= SEARCH_SEED


def best_settings(runs: Sequence[RunRecord]) -> Settings:
    """Return each method's draw with the highest mean accuracy on the test environment at the last checkpoint.

    The paper's "best known hyperparameters" are also selected on the test environment.
    """
    scores: dict[str, dict[int, list[float]]] = {}
    drawn: dict[tuple[str, int], dict[str, float]] = {}
    for run in runs:
        if is_search(run):
            last = float(run.accuracy_in[-1, TEST_ENV]) if run.status == "done" else 0.0
            scores.setdefault(run.spec.algorithm, {}).setdefault(run.spec.hparams_seed, []).append(last)
            values = {name: value for name, value in run.spec.hparams.items() if name not in VARIED}
            drawn[run.spec.algorithm, run.spec.hparams_seed] = values
    best = {
        method: max(found, key=lambda draw: sum(found[draw]) / len(found[draw])) for method, found in scores.items()
    }
    return {method: drawn[method, draw] for method, draw in best.items()}


def train(design: Design, folder: Path, device: torch.device, on_progress: OnProgress) -> list[RunRecord]:
    """Train the runs of the search, then those of the figure. A rerun with the same folder resumes."""
    search = design.search()
    total = design.steps * (len(search) + len(design.specs({method: {} for method in METHODS})))

    def train_some(specs: Sequence[RunSpec], stage: str, before: int) -> list[RunRecord]:
        def tell(task: str, done: int, _: int) -> None:
            on_progress(stage + task, before + done, total)

        return train_runs(
            specs, lambda spec: load_dataset("Spirals", noise=spec.options["noise"]), folder, device, tell
        )

    found = train_some(search, "search: ", 0)
    return [*found, *train_some(design.specs(best_settings(found)), "", design.steps * len(search))]
