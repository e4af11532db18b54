"""What the name of a composition stands for: `SANDMask+VREx`, `SAM+CORAL`, `SAM+ANDMask+IRM`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from sandmask.algorithms._base import Algorithm, AlgorithmEntry, ObjectiveAlgorithm, Problem
from sandmask.algorithms._combined import CombinedGradients
from sandmask.algorithms._composed import Composed
from sandmask.algorithms._masked import LogMaskedAlgorithm, MaskedAlgorithm
from sandmask.algorithms._sharpness import SharpnessAware
from sandmask.errors import SandmaskError

Kind = Literal["sharpness", "rule", "objective"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order that a name has them
PLAIN = "ERM"  # the objective where none is named
_PLURAL: Mapping[Kind, str] = {
    "sharpness": "sharpness-aware methods",
    "rule": "rules for gradients",
    "objective": "objectives",
}


def kind_of(entry: AlgorithmEntry) -> Kind | None:
    """What an algorithm is in a composition; None for one that has a step of its own."""
    build = entry.build
    if not isinstance(build, type):
        return None
    if issubclass(build, SharpnessAware) and build.step is SharpnessAware.step:
        return "sharpness"
    if issubclass(build, CombinedGradients) and build.step is CombinedGradients.step:
        return "rule"
    if issubclass(build, MaskedAlgorithm) and _is_its_mask(build):
        return "rule"
    if issubclass(build, ObjectiveAlgorithm) and build.step is ObjectiveAlgorithm.step:
        return "objective"
    return None


def _is_its_mask(build: type[MaskedAlgorithm]) -> bool:
    """Whether all of a method is in its mask, or in a `direction` of its own."""
    steps = build.step in (MaskedAlgorithm.step, LogMaskedAlgorithm.step)
    steps = steps or build.direction is not MaskedAlgorithm.direction
    own = ((MaskedAlgorithm, "update"), (MaskedAlgorithm, "risks"), (Algorithm, "predict"))
    return steps and all(getattr(build, name) is getattr(base, name) for base, name in own)


def compose(name: str, parts: Sequence[AlgorithmEntry], known: Iterable[AlgorithmEntry]) -> AlgorithmEntry:
    """The entry of a composition of `parts`, in whichever order they are named; ERM changes nothing.

    :param name: as the user wrote it, for messages.
    :param known: all algorithms: those that can be combined, for messages.
    """
    known = list(known)
    chosen: dict[Kind, AlgorithmEntry] = {}
    for entry in parts:
        kind = kind_of(entry)
        if kind is None:
            raise _refusal(name, f"{entry.name} is neither an objective nor a rule for gradients.", known)
        if kind in chosen:
            both = f"{chosen[kind].name} and {entry.name}"
            raise _refusal(name, f"{both} are both {_PLURAL[kind]}.", known)
        chosen[kind] = entry
    named = [chosen[kind] for kind in KINDS if kind in chosen and not (kind == "objective" and _is_plain(chosen[kind]))]
    if len(named) < 2:
        return (named or list(chosen.values()))[0]
    if "rule" in chosen and "objective" in chosen and not _is_by_environment(chosen["objective"]):
        raise _refusal(name, f"{chosen['objective'].name}'s gradient cannot be split by environment.", known)
    _check_names(name, named)
    chosen.setdefault("objective", next(entry for entry in known if _is_plain(entry)))
    return AlgorithmEntry(
        name="+".join(entry.name for entry in named),
        summary=" on the gradients of ".join(entry.name for entry in named),
        paper="; ".join(dict.fromkeys(entry.paper for entry in named)),
        build=_Build(chosen),
        hparams=[row for entry in reversed(named) for row in entry.hparams],
        compares_environments=any(entry.compares_environments for entry in named),
        caution=lambda hparams: next(_cautions(named, hparams), None),
    )


class _Build:
    """Builds the algorithm, of a problem."""

    def __init__(self, chosen: Mapping[Kind, AlgorithmEntry]) -> None:
        self._chosen = chosen

    def __call__(self, problem: Problem) -> Composed:
        objective, rule, sharpness = (
            self._chosen[kind].build(problem) if kind in self._chosen else None
            for kind in ("objective", "rule", "sharpness")
        )
        assert isinstance(objective, ObjectiveAlgorithm)
        assert rule is None or isinstance(rule, MaskedAlgorithm | CombinedGradients)
        assert sharpness is None or isinstance(sharpness, SharpnessAware)
        return Composed(objective, rule, sharpness)


def _is_plain(entry: AlgorithmEntry) -> bool:
    return entry.name == PLAIN


def _is_by_environment(entry: AlgorithmEntry) -> bool:
    return bool(getattr(entry.build, "by_environment", False))


def _check_names(name: str, parts: Sequence[AlgorithmEntry]) -> None:
    """Refuse parts that mean different things by one hyperparameter."""
    seen: dict[str, str] = {}
    for entry in parts:
        for row in {row.name for row in entry.hparams}:
            if row in seen:
                raise SandmaskError(
                    f"{name!r} cannot be composed: {seen[row]} and {entry.name} both have a hyperparameter {row!r}. "
                    "Rename it in one of them."
                )
            seen[row] = entry.name


def _cautions(parts: Sequence[AlgorithmEntry], hparams: Mapping[str, float]) -> Iterator[str]:
    yield from (found for entry in parts if (found := entry.caution(hparams)) is not None)


def _refusal(name: str, reason: str, known: Sequence[AlgorithmEntry]) -> SandmaskError:
    of_kind = {kind: [entry for entry in known if kind_of(entry) == kind] for kind in KINDS}
    lists = "; ".join(f"{_PLURAL[kind]}: {', '.join(e.name for e in entries)}" for kind, entries in of_kind.items())
    apart = " and ".join(entry.name for entry in of_kind["objective"] if not _is_by_environment(entry))
    return SandmaskError(
        f"{name!r} cannot be composed: {reason} Compose one of each kind, or two of them ({apart} not with a rule). "
        f"{lists[0].upper()}{lists[1:]}."
    )
