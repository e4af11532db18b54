"""Which runs compete with each other: those of one dataset, method, held-out environment and trial."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sandmask.records import RunRecord, RunSpec


@dataclass(frozen=True, order=True)
class GroupKey:
    """One trial of one cell of a table. `method` is the algorithm, with its settings where those differ."""

    dataset: str
    method: str
    test_env: int
    trial_seed: int


def _settings(spec: RunSpec) -> dict[str, str]:
    """What makes two runs of an algorithm different methods, rather than draws of one."""
    named = {
        name: str(getattr(spec, name))
        for name in ("space", "network", "weights", "precision", "steps", "checkpoint_every")
    }
    options = {name: _word(value) for name, value in spec.options.items()}
    return {**named, **options}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def method_names(runs: Iterable[RunRecord]) -> dict[str, str]:
    """The method of each run, by the run's id: runs that were trained by different settings never mix.

    That is the algorithm's name, followed by those settings in which its runs on one dataset differ, such as
    `SANDMask (space=domainbed)`. Hyperparameters and seeds are no settings: over those, a rule chooses.
    """
    specs = {run.spec.id: run.spec for run in runs}
    together: defaultdict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for spec in specs.values():
        together[spec.algorithm, spec.dataset].append(_settings(spec))
    varying: defaultdict[str, set[str]] = defaultdict(set)
    for (algorithm, _), settings in together.items():
        for name in {name for one in settings for name in one}:
            if len({one.get(name) for one in settings}) > 1:
                varying[algorithm].add(name)
    return {run_id: _name(spec, sorted(varying[spec.algorithm])) for run_id, spec in specs.items()}


def _name(spec: RunSpec, varying: Sequence[str]) -> str:
    settings = _settings(spec)
    shown = ", ".join(f"{name}={settings[name]}" for name in varying if name in settings)
    return f"{spec.algorithm} ({shown})" if shown else spec.algorithm


def group_runs(runs: Sequence[RunRecord]) -> dict[GroupKey, list[RunRecord]]:
    """The runs of each group, sorted by key. A run that holds out two environments is in two groups."""
    methods = method_names(runs)
    groups: defaultdict[GroupKey, list[RunRecord]] = defaultdict(list)
    for run in runs:
        for test_env in run.spec.test_envs:
            key = GroupKey(run.spec.dataset, methods[run.spec.id], test_env, run.spec.trial_seed)
            groups[key].append(run)
    return dict(sorted(groups.items()))
