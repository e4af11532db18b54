"""Groups of competing runs (one dataset, method, held-out environment and trial), and the run that is selected."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.records import RunRecord, RunSpec
from sandmask.selection._method_names import SEARCH, differing, method_names
from sandmask.selection._rules import Selected, SelectionRule


@dataclass(frozen=True, order=True)
class GroupKey:
    """One trial of one cell of a table. `method` is the algorithm, with the settings in which its runs differ."""

    dataset: str
    method: str
    test_env: int
    trial_seed: int


def group_runs(runs: Sequence[RunRecord]) -> dict[GroupKey, list[RunRecord]]:
    """Group runs by dataset, method, held-out environment and trial.

    A run that holds out two environments is in two groups.

    :param runs: records of the runs.
    :return: the runs of each group, sorted by key.
    """
    methods = method_names(runs)
    groups: defaultdict[GroupKey, list[RunRecord]] = defaultdict(list)
    for run in runs:
        for test_env in run.spec.test_envs:
            key = GroupKey(run.spec.dataset, methods[run.spec.id], test_env, run.spec.trial_seed)
            groups[key].append(run)
    return dict(sorted(groups.items()))


def rivals(runs: Iterable[RunRecord]) -> dict[str, list[float]]:
    """Return the hyperparameters (and "seed") in which runs of the same draw differ, with their values.

    A sweep has one run of each draw. If sweeps with different values set by hand are reported together, a draw has
    several runs, and a rule selects among them.

    :param runs: records of one method on one dataset.
    """
    of_draw: defaultdict[tuple[Any, ...], list[dict[str, float]]] = defaultdict(list)
    for spec in (run.spec for run in runs):
        numbers = {name: value for name, value in spec.hparams.items() if isinstance(value, int | float)}
        of_draw[spec.test_envs, spec.trial_seed, spec.hparams_seed].append({**numbers, "seed": spec.seed})
    found: defaultdict[str, set[float]] = defaultdict(set)
    for drawn in of_draw.values():
        for name in differing(drawn):
            found[name] |= {values[name] for values in drawn if name in values}
    return {name: sorted(values) for name, values in sorted(found.items())}


def changed_by_hand(now: Iterable[RunRecord], then: Iterable[RunRecord]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the hyperparameters in which runs of the same draw differ between two sets, with the values in each.

    A draw is the same in every sweep of a space, so that such hyperparameters were set by hand. Searched ones are not
    compared.

    :param now: records of one method on one dataset.
    :param then: records of the same method from another set.
    """
    after, before = _by_draw(now), _by_draw(then)
    found: defaultdict[str, tuple[set[float], set[float]]] = defaultdict(lambda: (set(), set()))
    for draw in after.keys() & before.keys():
        for name in differing([*after[draw], *before[draw]]):
            values = [{one[name] for one in some if name in one} for some in (after[draw], before[draw])]
            if values[0] != values[1]:
                found[name][0].update(values[0])
                found[name][1].update(values[1])
    return {name: (sorted(after), sorted(before)) for name, (after, before) in sorted(found.items())}


def _by_draw(runs: Iterable[RunRecord]) -> dict[tuple[Any, ...], list[dict[str, float]]]:
    """The drawn hyperparameters of each draw of a space. Several runs of a draw differ in what was set by hand."""
    found: defaultdict[tuple[Any, ...], list[dict[str, float]]] = defaultdict(list)
    for spec in (run.spec for run in runs):
        if SEARCH not in spec.options:
            numbers = {name: value for name, value in _drawn(spec).items() if isinstance(value, int | float)}
            found[spec.space, spec.test_envs, spec.trial_seed, spec.hparams_seed].append(numbers)
    return found


def is_settled(run: RunRecord) -> bool:
    """Return whether a run has ended (finished, diverged or pruned), so its record does not change any more.

    :param run: record of a run.
    """
    return run.status != "running"


def siblings(run: RunRecord, runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the runs with the same hyperparameters that hold out the run's environment and a second one.

    :param run: record of a run.
    :param runs: runs of the same dataset, method and trial.
    """
    test_env = run.spec.test_envs[0]
    return [
        other
        for other in runs
        if len(other.spec.test_envs) == 2
        and test_env in other.spec.test_envs
        and other.spec.hparams_seed == run.spec.hparams_seed
        and _drawn(other.spec) == _drawn(run.spec)
    ]


def _drawn(spec: RunSpec) -> dict[str, float]:
    """Return the hyperparameters without the steps at which the learning rate drops, which differ between runs."""
    return {name: value for name, value in spec.hparams.items() if name not in LR_DROP_STEPS}


def candidates(rule: SelectionRule, runs: Sequence[RunRecord], test_env: int) -> list[Selected]:
    """Return the checkpoint that a rule selects in each run, in the order of `hparams_seed`.

    Runs are left out if they are unfinished, hold out every environment, or cannot be judged by the rule (it returns
    None or a value of NaN).

    :param rule: the selection rule.
    :param runs: runs of one dataset, algorithm and trial.
    :param test_env: the held-out environment. Runs that hold out others too are left out.
    """
    settled = [run for run in runs if is_settled(run) and len(run.steps)]
    judged = [run for run in settled if run.spec.test_envs == (test_env,) and run.train_envs]
    judged.sort(key=lambda run: (run.spec.hparams_seed, run.spec.seed, run.spec.id))
    offers = []
    for run in judged:
        choice = rule.choose(run, siblings(run, settled) if rule.needs_pairs else ())
        if choice is not None and not any(map(math.isnan, choice.value)):
            offers.append(Selected(run, choice.index, choice.value, test_env))
    return offers


def select(rule: SelectionRule, runs: Sequence[RunRecord], test_env: int) -> Selected | None:
    """Return the run and checkpoint that a rule selects; None if no run is eligible.

    Of tied runs, the one with the highest `hparams_seed` is selected, as in DomainBed's collector. If validation
    accuracies saturate, ties are frequent and this order determines the table.

    :param rule: the selection rule.
    :param runs: runs of one dataset, algorithm and trial.
    :param test_env: the held-out environment.
    """
    best: Selected | None = None
    for offer in candidates(rule, runs, test_env):
        if best is None or offer.value >= best.value:
            best = offer
    return best
