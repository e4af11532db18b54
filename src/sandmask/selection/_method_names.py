"""Names of methods: the algorithm with the settings in which its runs differ, such as `ERM + SMA (space=domainbed)`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sandmask._text import counted
from sandmask.hparams import OPTIONAL
from sandmask.hparams._shared import LR_DROP_STEPS
from sandmask.records import RunRecord, RunSpec
from sandmask.records._types import word_of

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
        varying[algorithm] |= differing([settings_of(spec) for spec in some])
        chosen[algorithm] |= _set_by_hand(some)
    searches = _searches(specs.values())
    return {
        run_id: _name(spec, varying[spec.algorithm] | _ALWAYS, chosen[spec.algorithm], searches)
        for run_id, spec in specs.items()
    }


def differing(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names whose values differ between some settings; a missing value is a value, too.

    :param settings: values by name.
    """
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
