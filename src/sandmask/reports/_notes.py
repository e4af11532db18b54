"""Notes below the table of a dataset: what is missing, and which rows cannot be compared with the others."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from sandmask.records import RunRecord
from sandmask.selection import GroupKey, is_adapted, is_soup, rivals

Groups = Mapping[GroupKey, Sequence[RunRecord]]
_LISTED_VALUES = 6


def table_notes(dataset: str, methods: Sequence[str], absent: Sequence[str], groups: Groups) -> Iterator[str]:
    """Yield notes on environments without a column, and on methods that cannot be compared with the others."""
    if absent:
        yield f"No run holds out {', '.join(absent)} alone."
    yield from _on_rivals(dataset, methods, groups)
    yield from notes_on_adaptation(methods)


def notes_on_adaptation(methods: Sequence[str]) -> Iterator[str]:
    """Yield a note if a method uses examples that the others do not."""
    if any(map(is_adapted, methods)):
        yield "T3A adapts the model to unlabelled examples of the held-out environment."


def _on_rivals(dataset: str, methods: Sequence[str], groups: Groups) -> Iterator[str]:
    """Yield notes on methods with several runs of one draw, or several soups of one cell. Equal notes are merged."""
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for method in methods:
        cells = [runs for key, runs in groups.items() if (key.dataset, key.method) == (dataset, method)]
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


def _with_values(name: str, values: Sequence[float]) -> str:
    """Format a hyperparameter with its values, such as `tau (0.5, 0.9)`. Seeds are too long to list."""
    if name == "seed":
        return name
    more = len(values) - _LISTED_VALUES
    listed = ", ".join(f"{value:g}" for value in values[:_LISTED_VALUES])
    return f"{name} ({listed}{f' and {more} more' if more > 0 else ''})"
