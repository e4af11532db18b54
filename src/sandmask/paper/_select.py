"""Averages of a dataset under any rule, registered or not, and runs with fewer checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sandmask.records import MEASURES, RunRecord, split_averages
from sandmask.reports.statistics import mean_and_error
from sandmask.selection import (
    RULES,
    GroupKey,
    Selected,
    group_runs,
    is_settled,
    mean_over_environments,
    select,
    siblings,
)

Pick = Callable[[Sequence[RunRecord], int], Selected | None]  # selects among the runs of a trial, for an environment


def alone(runs: Sequence[RunRecord], test_env: int) -> list[RunRecord]:
    """Return the ended runs that hold out this environment and no other, in the order of their draws."""
    mine = [run for run in runs if is_settled(run) and len(run.steps) and run.spec.test_envs == (test_env,)]
    return sorted(mine, key=lambda run: (run.spec.hparams_seed, run.spec.seed, run.spec.id))


def by_rule(name: str) -> Pick:
    """Return the `Pick` of a registered rule."""
    return lambda runs, test_env: select(RULES[name], runs, test_env)


def trial_choices(runs: Sequence[RunRecord], pick: Pick) -> dict[GroupKey, Selected]:
    """Return what a rule selects for every (method, held-out environment, trial) with eligible runs."""
    found = {key: pick(group, key.test_env) for key, group in group_runs(runs).items()}
    return {key: chosen for key, chosen in found.items() if chosen is not None}


def averages(choices: dict[GroupKey, Selected], environments: int) -> dict[str, tuple[float, float | None] | None]:
    """Return each method's average over environments: its mean and error over trials, in percent.

    It is None if a trial lacks an environment. The error is None if there is only one trial.
    """
    result: dict[str, tuple[float, float | None] | None] = {}
    for method in dict.fromkeys(key.method for key in choices):
        trials: dict[int, list[float]] = {}
        for key, chosen in choices.items():
            if key.method == method and key.test_env < environments:
                trials.setdefault(key.trial_seed, []).append(chosen.test_accuracy)
        result[method] = None
        if trials and all(len(values) == environments for values in trials.values()):
            mean, error = mean_and_error([float(np.mean(values)) for values in trials.values()])
            result[method] = (mean, error if len(trials) > 1 else None)
    return result


def validation(run: RunRecord) -> NDArray[np.float64]:
    """Return the value that training-domain validation maximizes, at every checkpoint."""
    return mean_over_environments(run.accuracy_out[:, run.train_envs])


def tied(run: RunRecord) -> NDArray[np.int64]:
    """Return the indices of the checkpoints with the highest validation accuracy."""
    values = validation(run)
    return np.flatnonzero(values == values.max())


def every(run: RunRecord, steps: int) -> NDArray[np.int64]:
    """Return the indices of the checkpoints whose step is a multiple of `steps`, and of the last one."""
    kept = np.flatnonzero(run.steps % steps == 0)
    return np.union1d(kept, [len(run.steps) - 1]) if len(run.steps) else kept


def compact(runs: Sequence[RunRecord], interval: int) -> list[RunRecord]:
    """Remove training curves and checkpoints that no table needs.

    Each run keeps the checkpoints of every `interval` steps, and all that a rule may select for the run or one of its
    averages: under training-domain validation the first, last, luckiest and unluckiest of the tied checkpoints; those
    of worst-training-domain and leave-one-domain-out (also in the runs that it compares); and the last one, for the
    oracle. The answers of `why` for intervals that are multiples of `interval` also stay the same. Unfinished runs, and
    runs with metrics by which a rule may select, keep all checkpoints.
    """
    split = [part for run in runs for part in split_averages([run])]
    pairs = _steps_of_pairs(split)
    return [_compacted(_without_curves(run), interval, pairs) for run in runs]


def _selects_by(name: str) -> bool:
    """Whether a rule may select by a metric other than an average's accuracy."""
    return name.split("/", maxsplit=1)[0] in MEASURES or any(name in rule.needs_metrics for rule in RULES.values())


def _without_curves(run: RunRecord) -> RunRecord:
    kept = {name: run.metrics[name] for name in run.metrics if name.startswith("average/") or _selects_by(name)}
    return replace(run, metrics=kept)


def _compacted(run: RunRecord, interval: int, pairs: dict[str, set[int]]) -> RunRecord:
    if not is_settled(run) or not len(run.steps) or any(map(_selects_by, run.metrics)):
        return run
    steps = set(run.steps[every(run, interval)].tolist())
    for part in split_averages([run]):
        steps |= _selectable(part) | pairs.get(part.spec.id, set())
    return run.at(np.isin(run.steps, list(steps)))


def _selectable(run: RunRecord) -> set[int]:
    """Return the steps that training-domain and worst-training-domain may select."""
    if not run.train_envs or not len(run.steps):
        return set()
    best = tied(run)
    kept = {int(best[0]), int(best[-1])}
    for test_env in run.spec.test_envs:
        accuracy = run.accuracy_in[best, test_env]
        kept |= {int(best[accuracy.argmin()]), int(best[accuracy.argmax()])}
    worst = RULES["worst-training-domain"].choose(run, ())
    kept |= {worst.index} if worst is not None else set()
    return set(run.steps[sorted(kept)].tolist())


def _steps_of_pairs(runs: Sequence[RunRecord]) -> dict[str, set[int]]:
    """Return the steps of each run, by its id, that leave-one-domain-out selects in this run or in a sibling."""
    rule = RULES["leave-one-domain-out"]
    found: dict[str, set[int]] = {}
    for group in group_runs(runs).values():
        settled = [run for run in group if is_settled(run) and len(run.steps)]
        if not any(len(run.spec.test_envs) == 2 for run in settled):
            continue
        for run in settled:
            if len(run.spec.test_envs) != 1:
                continue
            others = siblings(run, settled)
            choice = rule.choose(run, others)
            if choice is not None:
                for each in (run, *others):
                    found.setdefault(each.spec.id, set()).add(int(run.steps[choice.index]))
    return found
