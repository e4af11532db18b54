"""Notes below the table of a dataset: what is missing, and which rows cannot be compared with the others."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from sandmask.records import RunRecord
from sandmask.selection import GroupKey, adaptation_of, changed_by_hand, is_soup, rivals

Groups = Mapping[GroupKey, Sequence[RunRecord]]
_LISTED_VALUES = 6


def table_notes(dataset: str, methods: Sequence[str], absent: Sequence[str], groups: Groups) -> Iterator[str]:
    """Yield notes on environments without a column, and on methods that cannot be compared with the others."""
    if absent:
        yield f"No run holds out {', '.join(absent)} alone."
    yield from _on_rivals(dataset, methods, groups)
    yield from notes_on_adaptation(methods)


def notes_on_adaptation(methods: Sequence[str]) -> Iterator[str]:
    """Yield a note for each way in which a method uses examples that the others do not."""
    for name in dict.fromkeys(filter(None, map(adaptation_of, methods))):
        yield f"{name} adapts the model to unlabelled examples of the held-out environment."


def _on_rivals(dataset: str, methods: Sequence[str], groups: Groups) -> Iterator[str]:
    """Yield notes on methods with several runs of one draw, or several soups of one cell. Equal notes are merged."""
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for method in methods:
        cells = _cells(dataset, method, groups)
        if is_soup(method):
            if any(len(runs) > 1 for runs in cells):
                rows["models of different sweeps compete"].append(method)
        elif differing := rivals(run for runs in cells for run in runs):
            where = " and ".join(_with_values(name, values) for name, values in differing.items())
            rows[f"runs of the same draw differ in {where} and compete"].append(method)
    for what, names in rows.items():
        yield (
            f"{', '.join(names)}: {what} with each other. To compare them, report their folders separately, or with "
            "--against."
        )


def changes_by_hand(now: Groups, then: Groups) -> dict[tuple[str, str], list[str]]:
    """For each dataset and method, notes on hyperparameters in which the same draws differ between two sets of runs."""
    notes: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in {(key.dataset, key.method) for key in now if not is_soup(key.method)}:
        after, before = ([run for cell in _cells(*row, groups) for run in cell] for groups in (now, then))
        for name, (values, earlier) in changed_by_hand(after, before).items():
            notes[row].append(f"{name} {_listed(values) or 'none'}, before {_listed(earlier) or 'none'}")
    return notes


def _cells(dataset: str, method: str, groups: Groups) -> list[Sequence[RunRecord]]:
    return [runs for key, runs in groups.items() if (key.dataset, key.method) == (dataset, method)]


def _with_values(name: str, values: Sequence[float]) -> str:
    """Format a hyperparameter with its values, such as `tau (0.5, 0.9)`. Seeds are too long to list."""
    return name if name == "seed" else f"{name} ({_listed(values)})"


def _listed(values: Sequence[float]) -> str:
    more = len(values) - _LISTED_VALUES
    listed = ", ".join(f"{value:g}" for value in values[:_LISTED_VALUES])
    return f"{listed}{f' and {more} more' if more > 0 else ''}"
