"""The numbers that the paper prints (Tables 1 to 3 and the appendix), and averages that do not follow from them."""

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from sandmask.reports import Cell, Table
from sandmask.selection import algorithm_of

AVERAGE = "Avg"
_ROUNDING = Decimal("0.05")  # the largest rounding error of a number with one decimal


@dataclass(frozen=True)
class PrintedCell:
    """A number of the paper, in percent. Averages have "Avg" instead of an environment or dataset.

    `table` is "1", "2", "3" or "appendix". The digits are those that are printed, so that 98 differs from 98.0.
    """

    table: str
    selection: str  # the rule's name in `sandmask.selection.RULES`
    dataset: str
    environment: str
    algorithm: str  # spelled one way: the paper has AND-mask and ANDMask, SAND-mask and SANDMask
    mean_digits: str
    error_digits: str

    @property
    def mean(self) -> float:
        """The accuracy in percent."""
        return float(self.mean_digits)

    @property
    def error(self) -> float | None:
        """The standard error in percent, if one is printed."""
        return float(self.error_digits) if self.error_digits else None


@cache
def printed_cells() -> tuple[PrintedCell, ...]:
    """Return every number of the paper, in its order."""
    text = files("sandmask.paper").joinpath("printed.csv").read_text(encoding="utf-8")
    return tuple(PrintedCell(*row) for row in list(csv.reader(text.splitlines()))[1:])


@cache
def _index(table: str | None) -> dict[tuple[str, str, str, str], PrintedCell]:
    # The tables of the main text come first and are preferred, because they have the standard errors of averages.
    index: dict[tuple[str, str, str, str], PrintedCell] = {}
    for cell in printed_cells():
        if table in (None, cell.table):
            index.setdefault((cell.selection, cell.dataset, cell.environment, cell.algorithm), cell)
    return index


def printed(
    selection: str,
    dataset: str,
    algorithm: str,
    environment: str = AVERAGE,
    *,
    table: str | None = None,
) -> PrintedCell | None:
    """Return the paper's number for a cell; None if the paper has none.

    `printed("oracle", "PACS", "SANDMask", "A")` is a cell of the appendix. Without the environment, the result is the
    dataset's average in Table 2. `printed("oracle", "Avg", "SANDMask")` is in the last column there.

    :param selection: "training-domain" or "oracle".
    :param dataset: name, or "Avg".
    :param algorithm: name of the algorithm.
    :param environment: name in the paper's tables, or "Avg".
    :param table: "1", "2", "3" or "appendix", for numbers that the paper prints twice. These are equal except for
        SANDMask on DomainNet: 32.3 in Table 2, and 32.2 in the appendix.
    """
    return _index(table).get((selection, dataset, environment, algorithm))


def datasets(table: str = "appendix") -> tuple[str, ...]:
    """Return the datasets of a table, in order.

    :param table: "1", "2", "3" or "appendix".
    """
    names = dict.fromkeys(cell.dataset for cell in printed_cells() if cell.table == table)
    return tuple(name for name in names if name != AVERAGE)


@cache
def environments(dataset: str) -> tuple[str, ...]:
    """Return the environments that the paper's tables report for a dataset, in order; empty if there are none.

    :param dataset: name of the dataset.
    """
    names = (cell.environment for cell in printed_cells() if (cell.table, cell.dataset) == ("appendix", dataset))
    return tuple(name for name in dict.fromkeys(names) if name != AVERAGE)


@cache
def algorithms() -> tuple[str, ...]:
    """Return the algorithms of the paper's tables, in order."""
    return tuple(dict.fromkeys(cell.algorithm for cell in printed_cells()))


class Inconsistency(NamedTuple):
    """A printed average, and the average recomputed from the printed values."""

    cell: PrintedCell
    recomputed: Decimal

    @property
    def explained_by_rounding(self) -> bool:
        """Whether the rounding of the values and of the average can explain the difference."""
        return abs(self.recomputed - Decimal(self.cell.mean_digits)) < 2 * _ROUNDING


def inconsistencies() -> list[Inconsistency]:
    """Return the printed averages that differ from the recomputed ones by more than their own rounding."""
    values: defaultdict[tuple[str, ...], list[Decimal]] = defaultdict(list)
    for cell in printed_cells():
        if cell.environment != AVERAGE:
            values[cell.table, cell.selection, cell.dataset, cell.algorithm].append(Decimal(cell.mean_digits))
        elif cell.dataset != AVERAGE and cell.table != "appendix":  # tables 1 and 2 average over datasets
            values[cell.table, cell.selection, AVERAGE, cell.algorithm].append(Decimal(cell.mean_digits))
    averages = [cell for cell in printed_cells() if cell.environment == AVERAGE]
    found = []
    for cell in averages:
        own = values.get((cell.table, cell.selection, cell.dataset, cell.algorithm), [])
        if own and abs((mean := sum(own, Decimal(0)) / len(own)) - Decimal(cell.mean_digits)) > _ROUNDING:
            found.append(Inconsistency(cell, mean))
    return found


def beside_paper(table: Table, rule: str, dataset: str | None) -> Table:
    """Add the paper's numbers to the cells that have one. `dataset` is None for the table of averages."""

    def cell_of(method: str, column: str) -> Cell:
        cell, name = table.cells[method, column], printed_name(method)
        if cell.parts is not None and not cell.parts.complete:
            return cell  # over fewer environments than the paper's
        paper = printed(rule, column, name) if dataset is None else printed(rule, dataset, name, column)
        return replace(cell, paper=paper)

    def average_of(method: str) -> Cell:
        cell = table.averages[method]
        if set(table.columns) != set(datasets("1") if dataset is None else environments(dataset)) or not (
            cell.parts and cell.parts.complete
        ):
            return cell
        source = None if dataset is None else "appendix"
        return replace(cell, paper=printed(rule, dataset or AVERAGE, printed_name(method), table=source))

    return replace(
        table,
        cells={(method, column): cell_of(method, column) for method, column in table.cells},
        averages={method: average_of(method) for method in table.methods},
    )


def printed_name(method: str) -> str:
    """Return the name of a method in the paper's tables. Averaged weights (`ERM + SMA`) have no row there."""
    algorithm = algorithm_of(method)
    return method if method.startswith(f"{algorithm} + ") else algorithm
