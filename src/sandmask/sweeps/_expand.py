"""The runs of a sweep."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sandmask._text import counted
from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DatasetEntry, absolute, dataset_entry, double_meaning, resolve_environment
from sandmask.errors import SandmaskError
from sandmask.hparams import OPTIONAL, Space, seed_hash, space_for
from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.networks._build import NO_WEIGHTS, PRETRAINED
from sandmask.records import RunSpec, parse_measures, read_runs
from sandmask.records._averages import first_stage
from sandmask.registry import check_known, closest
from sandmask.selection import RULES, SEARCH, is_settled
from sandmask.sweeps._optuna import distribution, rehearse, sampler_name
from sandmask.sweeps._spec import ALL, OPTUNA, SweepSpec
from sandmask.training import PRECISIONS, make_spec, parse_averages
from sandmask.training.specs import short_average_of, unreached_steps

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MIN_TRAINING_ENVS = 2
MOST_RUNS = 1_000_000  # each takes about 2 kB of memory and 1 kB of disk


@dataclass(frozen=True)
class Expansion:
    """The runs of a sweep, each once, and notes for the user, for example on requests that give no runs.

    `sources` maps the name of each dataset in records to what is loaded: the same name, or the path of your own data.
    """

    runs: tuple[RunSpec, ...]
    sources: dict[str, str]
    notes: tuple[str, ...] = ()


def normalized(sweep: SweepSpec) -> SweepSpec:
    """Return the sweep with every name spelled as it is registered; an unknown name is an error.

    :param sweep: the sweep.
    """
    rules = tuple(RULES) if ALL in sweep.selection else sweep.selection
    algorithms = tuple(ALGORITHMS) if ALL in sweep.algorithms else sweep.algorithms
    check_known("precision", sweep.precision, PRECISIONS)
    return replace(
        sweep,
        datasets=tuple(absolute(name) for name in sweep.datasets),
        algorithms=tuple(ALGORITHMS[name].name for name in algorithms),
        selection=tuple(RULES[name].name for name in rules),
        averages=parse_averages(sweep.averages),
        metrics=parse_measures(sweep.metrics),
        sampler=sampler_name(sweep.sampler) if sweep.search == OPTUNA else sweep.sampler,
        first_stage=None if sweep.first_stage is None else os.path.abspath(sweep.first_stage),  # noqa: PTH100
        weights=None if sweep.weights is None else _absolute_weights(sweep.weights),
    )


def _absolute_weights(weights: str) -> str:
    return weights if weights in (PRETRAINED, NO_WEIGHTS) else os.path.abspath(weights)  # noqa: PTH100


def expand(sweep: SweepSpec) -> Expansion:
    """Return every run of a sweep. See `group` for the order of training.

    :param sweep: the sweep.
    """
    sweep = normalized(sweep)
    entries = {name: dataset_entry(name) for name in sweep.datasets}
    sources = {entry.name: name for name, entry in entries.items()}
    if len(sources) != len(entries):
        raise SandmaskError("Two of the datasets have the same name and the same images. Remove one of them.")
    _check_overrides(sweep, entries.values())
    sets = {entry.name: _held_out_sets(sweep, entry) for entry in entries.values()}
    _check_size(sweep, sum(map(len, sets.values())))
    named = () if sweep.test_envs == (ALL,) else sweep.test_envs
    notes = [note for entry in entries.values() for env in named if (note := double_meaning(entry, env))]
    if sweep.search == OPTUNA:
        _check_search(sweep)
        notes.append(
            "Optuna chooses the hyperparameters while runs train; estimates are for random draws without pruning."
        )
    if _needs_pairs(sweep):
        notes += [
            f"{entry.name}: holding out two of its {len(entry.environments)} environments leaves too few "
            "to train on; no runs for leave-one-domain-out."
            for entry in entries.values()
            if not _has_pairs(entry)
        ]
    runs: Iterable[RunSpec] = (
        run
        for entry, algorithm in product(entries.values(), sweep.algorithms)
        for run in _draws(sweep, entry, algorithm, sets[entry.name])
    )
    if sweep.first_stage is not None:
        runs = _repeat_drops(runs, sweep.first_stage)
    found = tuple(runs)
    notes += [*_notes_on_steps(found), *dict.fromkeys(filter(None, map(short_average_of, found)))]
    return Expansion(found, sources, tuple(notes))


def _notes_on_steps(runs: Iterable[RunSpec]) -> Iterator[str]:
    """Notes on methods that change at a certain step, if at least half of their draws end before it."""
    draws: defaultdict[tuple[str, str], dict[tuple[int, int], RunSpec]] = defaultdict(dict)
    for run in runs:
        draws[run.dataset, run.algorithm].setdefault((run.trial_seed, run.hparams_seed), run)
    for (dataset, algorithm), each in draws.items():
        late = Counter(name for run in each.values() for name in unreached_steps(run))
        for name, count in late.items():
            if 2 * count >= len(each):
                steps = next(iter(each.values())).steps
                yield (
                    f"{algorithm} on {dataset}: in {count} of {counted(len(each), 'draw')}, {name} is not reached in "
                    f"{counted(steps, 'step')}, so these runs stay in the method's first phase. Lower it with "
                    f"--hparam {name}=N, or train longer with --steps."
                )


def _needs_pairs(sweep: SweepSpec) -> bool:
    return any(RULES[rule].needs_pairs for rule in sweep.selection)


def _has_pairs(entry: DatasetEntry) -> bool:
    return len(entry.environments) - 2 >= MIN_TRAINING_ENVS


def _held_out_sets(sweep: SweepSpec, entry: DatasetEntry) -> list[tuple[int, ...]]:
    """The sets of environments that runs on a dataset hold out."""
    held_out = _test_environments(sweep, entry)
    sets: list[tuple[int, ...]] = [(env,) for env in held_out]
    if _needs_pairs(sweep) and _has_pairs(entry):  # a run with a pair counts for both of its environments
        pairs = combinations(range(len(entry.environments)), 2)
        sets += [pair for pair in pairs if not set(pair).isdisjoint(held_out)]
    return sets


def _test_environments(sweep: SweepSpec, entry: DatasetEntry) -> list[int]:
    """The numbers of the held-out environments on a dataset."""
    if sweep.test_envs == (ALL,):
        return list(range(len(entry.environments)) if entry.report_envs is None else entry.report_envs)
    found = [resolve_environment(entry, env) for env in sweep.test_envs]
    if len(set(found)) < len(found):
        pairs = zip(sweep.test_envs, found, strict=True)
        names = ", ".join(f"{env} is {entry.environments[number]!r}" for env, number in pairs)
        raise SandmaskError(f"Two of the environments to hold out of {entry.name} are the same: {names}.")
    return found


def _draws(sweep: SweepSpec, entry: DatasetEntry, algorithm: str, sets: Sequence[tuple[int, ...]]) -> Iterator[RunSpec]:
    own = _hparam_names(sweep, entry, algorithm)
    no_drops = {} if sweep.first_stage is None else dict.fromkeys(LR_DROP_STEPS, 0)
    for trial, draw in product(range(sweep.n_trials), range(sweep.n_hparams)):
        like = make_spec(
            entry,
            algorithm,
            sets[0],
            steps=sweep.steps,
            checkpoint_every=sweep.checkpoint_every,
            hparams={**{name: value for name, value in sweep.hparams.items() if name in own}, **no_drops},
            hparams_seed=draw,
            trial_seed=trial,
            space=sweep.space,
            network=sweep.network,
            weights=sweep.weights,
            precision=sweep.precision,
            averages=sweep.averages,
            shared_init=sweep.shared_init,
        )
        if sweep.search == OPTUNA:
            like = replace(like, options={**like.options, SEARCH: f"{sweep.sampler}/{sweep.pruner}"})
        for test_envs in sets:  # a draw is the same for all of them
            seed = run_seed(entry.name, algorithm, test_envs, draw, trial, sweep.seed)
            yield replace(like, test_envs=test_envs, seed=seed)


def run_seed(
    dataset: str, algorithm: str, test_envs: tuple[int, ...], hparams_seed: int, trial_seed: int, seed: int = 0
) -> int:
    """Return the seed of a run: a hash of its arguments, as in DomainBed's sweeps.

    :param dataset: name of the dataset.
    :param algorithm: name of the algorithm.
    :param test_envs: indices of the held-out environments.
    :param hparams_seed: number of the draw.
    :param trial_seed: number of the repetition.
    :param seed: seed of the sweep, which is hashed in unless it is 0.
    """
    parts = (dataset, algorithm, list(test_envs), hparams_seed, trial_seed)
    return seed_hash(*parts, seed) if seed else seed_hash(*parts)


def _repeat_drops(runs: Iterable[RunSpec], folder: str) -> Iterator[RunSpec]:
    """Runs on all data, which repeat the drops of the learning rate of their first stage in `folder`: see ERM++."""
    finished = {run.spec.id: run for run in read_runs(Path(folder)) if is_settled(run)}
    for spec in runs:
        first = finished.get(first_stage(spec).id)
        if first is None:
            raise SandmaskError(
                f"{folder} lacks a finished run of {spec.algorithm} on {spec.dataset} with held-out environments "
                f"{list(spec.test_envs)}, draw {spec.hparams_seed}, trial {spec.trial_seed} and the same settings, but "
                "without full_data. Train it first."
            )
        if "lr_drops" not in first.metrics:
            raise SandmaskError(f"The runs of {folder} were trained without lr_patience. Leave out --first-stage.")
        drops = first.steps[1:][np.diff(first.metrics["lr_drops"]) > 0].tolist()
        yield replace(spec, hparams={**spec.hparams, **dict(zip(LR_DROP_STEPS, drops, strict=False))})


def _space(sweep: SweepSpec, entry: DatasetEntry, algorithm: str) -> Space:
    chosen = ALGORITHMS[algorithm]
    return space_for(entry.scope, entry.name, chosen.name, chosen.hparams, sweep.space)


def _hparam_names(sweep: SweepSpec, entry: DatasetEntry, algorithm: str) -> set[str]:
    return {*_space(sweep, entry, algorithm), *(row.name for row in OPTIONAL)}


def search_ranges(sweep: SweepSpec, dataset: str, algorithm: str) -> dict[str, "BaseDistribution"]:
    """The search ranges of an algorithm's hyperparameters, except those that are constant or set by hand."""
    space = _space(sweep, dataset_entry(dataset), algorithm)
    found = {row.name: distribution(row) for row in space.rows if row.name not in sweep.hparams}
    ranges = {name: kind for name, kind in found.items() if kind is not None}
    if not ranges:
        raise SandmaskError(f"There is nothing to search for {space.title}: every hyperparameter is constant.")
    return ranges


def _check_overrides(sweep: SweepSpec, entries: Iterable[DatasetEntry]) -> None:
    """Refuse a hyperparameter that no algorithm of the sweep has."""
    known = {
        name
        for entry, algorithm in product(entries, sweep.algorithms)
        for name in _hparam_names(sweep, entry, algorithm)
    }
    for name in sweep.hparams:
        if name not in known:
            raise SandmaskError(
                f"No algorithm of the sweep has a hyperparameter {name!r}. {closest(name, sorted(known))}"
            )


def _check_size(sweep: SweepSpec, sets: int) -> None:
    """Refuse too many runs for memory, before they are built."""
    runs = sets * len(sweep.algorithms) * sweep.n_hparams * sweep.n_trials
    if runs > MOST_RUNS:
        raise SandmaskError(
            f"The sweep has {runs:,} runs ({sweep.n_hparams:,} draws, {sweep.n_trials:,} trials); the limit is "
            f"{MOST_RUNS:,}. Request fewer draws or trials, or divide the sweep over several folders."
        )


def _check_search(sweep: SweepSpec) -> None:
    """Refuse sweeps that cannot be searched, before anything is written."""
    if _needs_pairs(sweep):
        raise SandmaskError(
            "--search optuna proposes different hyperparameters for each held-out environment, but the rule "
            "leave-one-domain-out needs the same hyperparameters for pairs of environments. Leave out one of the two."
        )
    if sweep.full_data:
        raise SandmaskError("--search optuna needs validation accuracies, but runs with full_data=1 have none.")
    ranges = [
        search_ranges(sweep, dataset, algorithm) for dataset, algorithm in product(sweep.datasets, sweep.algorithms)
    ]
    rehearse(sweep.sampler, ranges[0])
