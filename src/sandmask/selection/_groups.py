"""Groups of competing runs (one dataset, method, held-out environment and trial), and the run that is selected."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandmask._text import counted
from sandmask.hparams import OPTIONAL
from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.records import RunRecord, RunSpec
from sandmask.records._types import word_of
from sandmask.selection._rules import Selected, SelectionRule


@dataclass(frozen=True, order=True)
class GroupKey:
    """One trial of one cell of a table. `method` is the algorithm, with the settings in which its runs differ."""

    dataset: str
    method: str
    test_env: int
    trial_seed: int


ADAPTATIONS = {"t3a": "T3A", "unidg": "UniDG"}  # kinds of soups that see test examples, and their names


def spoken_soup(kind: str) -> str:
    """Return the name of a kind of soup in names of methods.

    :param kind: "uniform", "greedy", "ensemble", "t3a" or "unidg".
    """
    return {"ensemble": "ensemble", **ADAPTATIONS}.get(kind, f"{kind} soup")


_FIELDS = ("space", "network", "weights", "precision", "steps", "checkpoint_every")
_OPTIMIZER = frozenset(hparam.name for hparam in OPTIONAL) - frozenset(LR_DROP_STEPS)  # which differ by environment
# Options that follow the algorithm in a method's name: "ERM + SMA". All others are in brackets.
_SPOKEN: dict[str, Callable[[str], str]] = {
    "average": str.upper,
    "soup": spoken_soup,
    "schedule": "{} schedule".format,
    "decay": "{} decay".format,
}
SEARCH = "search"  # the option of runs whose hyperparameters were not drawn at random
_SEARCHED = "searched"
_ALWAYS = frozenset({"average", "soup", SEARCH})  # shown even where all runs of an algorithm have it
_PLUS, _BRACKET = " + ", " ("


def settings_of(spec: RunSpec) -> dict[str, str]:
    """Return the settings of a run. Runs with different settings belong to different methods.

    :param spec: spec of the run.
    """
    named = {name: str(getattr(spec, name)) for name in _FIELDS}
    return {**named, **{name: word_of(value) for name, value in spec.options.items()}}


def method_names(runs: Iterable[RunRecord]) -> dict[str, str]:
    """Return the method of each run; runs with different settings have different methods.

    A method is named after its algorithm and those settings in which its runs on one dataset differ, such as `SANDMask
    (space=domainbed)` or `ERM + SMA`. Hyperparameters and seeds are not settings, except for options of the optimizer
    (`hparams.OPTIONAL`) that were set by hand: if the same draw of the same trial was trained with and without them,
    these runs belong to two methods. Runs of a search and runs of random draws always belong to different methods; the
    former are named `ERM (searched, 20 proposals)`.

    :param runs: records of the runs.
    :return: names by the runs' ids.
    """
    specs = {run.spec.id: run.spec for run in runs}
    together: defaultdict[tuple[str, str], list[RunSpec]] = defaultdict(list)
    for spec in specs.values():
        together[spec.algorithm, spec.dataset].append(spec)
    varying: defaultdict[str, set[str]] = defaultdict(set)
    chosen: defaultdict[str, set[str]] = defaultdict(set)
    for (algorithm, _), some in together.items():
        varying[algorithm] |= _differing([settings_of(spec) for spec in some])
        chosen[algorithm] |= _set_by_hand(some)
    searches = _searches(specs.values())
    return {
        run_id: _name(spec, varying[spec.algorithm] | _ALWAYS, chosen[spec.algorithm], searches)
        for run_id, spec in specs.items()
    }


def _differing(settings: Sequence[dict[str, Any]]) -> set[str]:
    names = {name for one in settings for name in one}
    return {name for name in names if len({one.get(name) for one in settings}) > 1}


def _set_by_hand(specs: Sequence[RunSpec]) -> set[str]:
    """Return the optimizer options that differ within a draw, so they were set by hand and not drawn from a space."""
    names = {name for spec in specs for name in spec.hparams if name in _OPTIMIZER}
    found = set()
    for name in names:
        values: defaultdict[tuple[Any, ...], set[Any]] = defaultdict(set)
        for spec in specs:
            values[spec.space, spec.hparams_seed, spec.trial_seed].add(spec.hparams.get(name))
        if any(len(seen) > 1 for seen in values.values()):
            found.add(name)
    return found


def _searches(specs: Iterable[RunSpec]) -> dict[str, str]:
    """Describe each kind of search, with the largest number of proposals for a cell."""
    seen: defaultdict[str, defaultdict[tuple[Any, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    for spec in specs:
        if kind := spec.options.get(SEARCH):
            cell = (spec.dataset, spec.algorithm, spec.test_envs, spec.trial_seed)
            seen[word_of(kind)][cell].add(spec.hparams_seed)
    by = " by {}" if len(seen) > 1 else ""
    return {
        kind: f"{_SEARCHED}{by.format(kind)}, {counted(max(map(len, cells.values())), 'proposal')}"
        for kind, cells in seen.items()
    }


def _name(spec: RunSpec, settings: Iterable[str], hparams: Iterable[str], searches: Mapping[str, str]) -> str:
    values = {name: value for name, value in settings_of(spec).items() if name in settings}
    searched = [searches[values.pop(SEARCH)]] if SEARCH in values else []
    values |= {name: word_of(spec.hparams[name]) for name in hparams if name in spec.hparams}
    spoken = [say(values[name]) for name, say in _SPOKEN.items() if name in values]
    others = searched + [f"{name}={value}" for name, value in sorted(values.items()) if name not in _SPOKEN]
    return _PLUS.join([spec.algorithm, *spoken]) + (f"{_BRACKET}{', '.join(others)})" if others else "")


def is_soup(method: str) -> bool:
    """Return whether a method is made of kept models, such as `ERM + greedy soup`, `ERM + ensemble` and `ERM + T3A`.

    :param method: name of a method in a table.
    """
    kinds = ("ensemble", *ADAPTATIONS.values())
    return any(word in kinds or word.endswith(" soup") for word in _spoken(method))


def adaptation_of(method: str) -> str | None:
    """Return how a method adapts to unlabelled examples of the held-out environment: "T3A" of `ERM + T3A`.

    :param method: name of a method in a table.
    """
    return next((word for word in _spoken(method) if word in ADAPTATIONS.values()), None)


def _spoken(method: str) -> list[str]:
    """The words after the algorithm: `SMA` and `T3A` of `ERM + SMA + T3A (space=domainbed)`."""
    return method.split(_BRACKET, maxsplit=1)[0].split(_PLUS)[1:]


def is_searched(method: str) -> bool:
    """Return whether the hyperparameters of a method's runs were searched.

    :param method: name of a method in a table.
    """
    return f"{_BRACKET}{_SEARCHED}" in method


def algorithm_of(method: str) -> str:
    """Return the algorithm in a method's name: `ERM` of `ERM + SMA (space=domainbed)`.

    :param method: name of a method in a table.
    """
    return method.split(_BRACKET, maxsplit=1)[0].split(_PLUS, maxsplit=1)[0]


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
        for name in _differing(drawn):
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
        for name in _differing([*after[draw], *before[draw]]):
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
