"""Which number of a column stands out: the best one, where there is one."""

import math
from collections.abc import Mapping

from sandmask.reports._data import Cell, Table

BEST_NOTE = (
    "Bold: the highest number of a column, if it is above chance and no other number of the column rounds to the same."
)


def best_cells(table: Table) -> set[tuple[str, str | None]]:
    """The (method, column) of each column's best cell; None is the column of averages."""
    found: set[tuple[str | None, str | None]] = set()
    for column in table.columns:
        best = best_method({m: table.cells[m, column] for m in table.methods}, table.chances.get(column))
        found.add((best, column))
    known = [table.chances[column] for column in table.columns if column in table.chances]
    chance = sum(known) / len(known) if known and len(known) == len(table.columns) else None
    found.add((best_method(table.averages, chance), None))
    return {(method, column) for method, column in found if method is not None}


def best_method(cells: Mapping[str, Cell], chance: float | None) -> str | None:
    """The method with the highest mean of a column; None for ties as printed, and for what is not above chance.

    Averages compete with those over as many columns: over others, they do not compare. A single number is not a best.
    """
    means = {method: cell.mean for method, cell in cells.items() if cell.mean is not None and math.isfinite(cell.mean)}
    widest = max((_columns(cells[method]) for method in means), default=0)
    shown = {method: round(mean, 1) for method, mean in means.items() if _columns(cells[method]) == widest}
    if len(shown) < 2:
        return None
    highest = max(shown.values())
    first, *others = [method for method, mean in shown.items() if mean == highest]
    is_above_chance = chance is None or highest > round(chance, 1)
    return first if is_above_chance and not others else None


def _columns(cell: Cell) -> int:
    return cell.parts.found if cell.parts is not None else 1
