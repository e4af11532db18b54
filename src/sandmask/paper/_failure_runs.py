"""The runs of Figure 2: what is varied, as specs, and the search for hyperparameters that comes first."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sandmask.datasets import DATASETS, Dataset, load_dataset
from sandmask.paper._product import Report, silent
from sandmask.records import RunRecord, RunSpec, read_runs, write_archive
from sandmask.training import Progress, make_spec, stack_key, train_stack

Source = Callable[[RunSpec], str]  # the name of the data that a run is trained on
Load = Callable[[RunSpec], Dataset]


def stacks(specs: Sequence[RunSpec], source: Source) -> list[list[RunSpec]]:
    """Runs that train as one program on the same data."""
    found: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in specs:
        found.setdefault((stack_key(spec), source(spec)), []).append(spec)
    return list(found.values())


def train_runs(
    specs: Sequence[RunSpec],
    source: Source,
    load: Load,
    folder: Path,
    device: torch.device,
    report: Report = silent,
    *,
    weights: str | None = None,
) -> list[RunRecord]:
    """Train all runs. What is done is kept in `folder`; what was started goes on there."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(spec.steps for spec in specs)
    runs: list[RunRecord] = []
    before = 0
    for stack in stacks(specs, source):
        ids = hashlib.sha256("".join(spec.id for spec in stack).encode()).hexdigest()[:8]
        name = f"{stack[0].algorithm.lower()}-{source(stack[0])}-{ids}"
        archive, checkpoint = folder / f"{name}.records.parquet", folder / f"{name}.safetensors"
        if not archive.exists():
            what = f"{stack[0].algorithm}, {source(stack[0])}, {len(stack)} runs"
            report(what, before, total)

            def tell(progress: Progress, what: str = what, before: int = before, count: int = len(stack)) -> None:
                report(what, before + count * progress.done, total)

            records = train_stack(stack, load(stack[0]), device, checkpoint, on_progress=tell, weights=weights)
            write_archive(records, archive)
            checkpoint.unlink(missing_ok=True)
        runs += read_runs(archive)
        before += sum(spec.steps for spec in stack)
    return runs


TEST_ENV = 0  # the environment without shortcuts: accuracy there is that of the spiral alone
MOMENTUM, NOISE, SCALE = 0.9, 0.0, 1.0  # what two of the three are while the third is varied
METHODS = ("ERM", "ANDMask", "ANDMask-rescaled", "SANDMask", "SANDMask-released")
VARIED = ("adam_beta1", "init_scale")  # hyperparameters that the figure sets
SHAPES = (("batch_size", 128), ("mlp_width", 256), ("mlp_depth", 3), ("dropout", 0))
SEARCH_SEED = 1000  # the seeds of the search are not those of the figure

Settings = dict[str, dict[str, float]]  # hyperparameters by method


@dataclass(frozen=True)
class Design:
    """The design of Figure 2: values, steps, and the number of draws in the search."""

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
        """Random draws from the paper's space for every method, to find its "best known hyperparameters"."""
        return [
            self._spec(method, {}, (MOMENTUM, NOISE, SCALE), SEARCH_SEED + seed, draw=draw)
            for method in METHODS
            for draw in range(self.draws)
            for seed in range(self.search_seeds)
        ]

    def specs(self, settings: Settings) -> list[RunSpec]:
        """Every run once: the conditions that the three panels share are trained once."""
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
            trial_seed=0 if seed >= SEARCH_SEED else seed,  # of which a draw is a function
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
    """Whether a run is of the search, and not of the figure."""
    return run.spec.seed >= SEARCH_SEED


def best_settings(runs: Sequence[RunRecord]) -> Settings:
    """For each method the draw with the highest mean accuracy on the test environment, at the last checkpoint.

    It looks at the test environment, as the paper's "best known hyperparameters" do.
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


def noise_of(spec: RunSpec) -> str:
    """The data of a run: Spirals with noise on the invariant dimensions."""
    return f"noise-{spec.options['noise']:g}"


def train(design: Design, folder: Path, device: torch.device, report: Report) -> list[RunRecord]:
    """All runs of a design, the search first. What is done is kept in `folder`; what was started goes on there."""
    search = design.search()
    total = design.steps * (len(search) + len(design.specs({method: {} for method in METHODS})))

    def train_some(specs: Sequence[RunSpec], stage: str, before: int) -> list[RunRecord]:
        def tell(what: str, done: int, _: int) -> None:
            report(stage + what, before + done, total)

        return train_runs(specs, noise_of, _load, folder, device, tell)

    found = train_some(search, "search: ", 0)
    return [*found, *train_some(design.specs(best_settings(found)), "", design.steps * len(search))]


def _load(spec: RunSpec) -> Dataset:
    return load_dataset("Spirals", noise=spec.options["noise"])
