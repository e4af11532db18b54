"""The numbers that the paper prints (Tables 1 to 3 and the appendix), and where they disagree with themselves.

Averages are recomputed from the printed, rounded values of the same table. An average of rounded values that
is rounded again can be off by almost 0.1, so most of these are rounding and mean nothing;
`explained_by_rounding` tells them from the ones that no rounding explains.
"""

import csv
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib.resources import files

from sandmask.reports import Cell, Table
from sandmask.selection import algorithm_of

AVERAGE = "Avg"


@dataclass(frozen=True)
class PrintedCell:
    """One number of the paper, in percent; averages have "Avg" where an environment or dataset would be.

    `table` is "1", "2", "3" or "appendix". Digits are kept as printed, so that 98 is told from 98.0.
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
        """The standard error in percent, where one is printed."""
        return float(self.error_digits) if self.error_digits else None


@cache
def printed_cells() -> tuple[PrintedCell, ...]:
    """Every number, in the order of the paper."""
    text = files("sandmask.paper").joinpath("printed.csv").read_text(encoding="utf-8")
    return tuple(PrintedCell(*row) for row in list(csv.reader(text.splitlines()))[1:])


@cache
def _index(table: str | None) -> dict[tuple[str, str, str, str], PrintedCell]:
    # The tables of the main text come first and have the standard error of the averages, so they win.
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
    """Return the paper's number for a cell; None if it has none.

    `printed("oracle", "PACS", "SANDMask", "A")` is a cell of the appendix. Without the environment, it is the
    dataset's average in Table 2, and `printed("oracle", "Avg", "SANDMask")` is the last column there.

    :param selection: "training-domain" or "oracle".
    :param dataset: name, or "Avg".
    :param algorithm: name of the algorithm.
    :param environment: name in the paper's tables, or "Avg".
    :param table: "1", "2", "3" or "appendix", where the paper prints a number twice.
    """
    return _index(table).get((selection, dataset, environment, algorithm))


@cache
def environments(dataset: str) -> tuple[str, ...]:
    """The environments that the paper's tables report for a dataset, in order; empty for an unknown one."""
    names = (cell.environment for cell in printed_cells() if (cell.table, cell.dataset) == ("appendix", dataset))
    return tuple(name for name in dict.fromkeys(names) if name != AVERAGE)


@cache
def algorithms() -> tuple[str, ...]:
    """The algorithms of the paper's tables, in order."""
    return tuple(dict.fromkeys(cell.algorithm for cell in printed_cells()))


@cache
def datasets() -> tuple[str, ...]:
    """The datasets of the paper's tables, in the order of the appendix."""
    return tuple(dict.fromkeys(cell.dataset for cell in printed_cells() if cell.table == "appendix"))


@dataclass(frozen=True)
class Inconsistency:
    """A printed average, and what the printed values that it averages give."""

    table: str
    selection: str
    dataset: str
    algorithm: str
    printed: str
    recomputed: str  # to four decimals
    explained_by_rounding: bool = True

    @property
    def difference(self) -> Decimal:
        """Printed minus recomputed."""
        return Decimal(self.printed) - Decimal(self.recomputed)


@dataclass(frozen=True)
class Slip:
    """Something else about a printed number that a reader should know."""

    table: str
    selection: str
    dataset: str
    algorithm: str
    note: str


INCONSISTENCIES: tuple[Inconsistency, ...] = (
    Inconsistency("1", "training-domain", "Avg", "Mixup", "66.7", "66.7571"),
    Inconsistency("1", "training-domain", "Avg", "CDANN", "65.6", "65.6571"),
    Inconsistency("1", "training-domain", "Avg", "SagNet", "67.2", "67.2571"),
    Inconsistency("2", "oracle", "Avg", "MLDG", "68.7", "68.6429"),
    Inconsistency("appendix", "training-domain", "Spirals", "ANDMask", "88.0", "88.0875"),
    Inconsistency("appendix", "training-domain", "Spirals", "SANDMask", "49.2", "49.3000", explained_by_rounding=False),
    Inconsistency("appendix", "oracle", "Spirals", "SANDMask", "91.1", "91.4125", explained_by_rounding=False),
    Inconsistency("appendix", "oracle", "ColoredMNIST", "Mixup", "58.4", "58.3333"),
    Inconsistency("appendix", "oracle", "ColoredMNIST", "CORAL", "58.6", "58.5333"),
    Inconsistency("appendix", "oracle", "ColoredMNIST", "DANN", "57.0", "57.0667"),
    Inconsistency("appendix", "oracle", "ColoredMNIST", "SANDMask", "62.3", "62.4667", explained_by_rounding=False),
    Inconsistency("appendix", "oracle", "PACS", "VREx", "87.2", "87.2750"),
    Inconsistency("appendix", "training-domain", "OfficeHome", "CDANN", "65.8", "65.7250"),
    Inconsistency("appendix", "oracle", "TerraIncognita", "RSC", "52.1", "52.1750"),
    Inconsistency("appendix", "oracle", "TerraIncognita", "ANDMask", "49.8", "49.8750"),
    Inconsistency("appendix", "oracle", "DomainNet", "Mixup", "39.6", "39.6667"),
)

SLIPS: tuple[Slip, ...] = (
    Slip(
        "2",
        "oracle",
        "DomainNet",
        "SANDMask",
        "Table 2 prints 32.3 ± 0.6 (and a stray full stop), the appendix 32.2, which its environments give.",
    ),
    Slip(
        "3",
        "oracle",
        "Spirals",
        "ANDMask",
        "97.25 has two decimals, in Table 3 and in the appendix: the average of the rounded values.",
    ),
)


def beside_paper(table: Table, rule: str, dataset: str | None) -> Table:
    """The same table with the paper's number in every cell that has one; `dataset` is None for averages."""

    def cell_of(method: str, column: str) -> Cell:
        cell, name = table.cells[method, column], printed_name(method)
        if cell.parts is not None and not cell.parts.complete:
            return cell  # over fewer environments than the paper's
        paper = printed(rule, column, name) if dataset is None else printed(rule, dataset, name, column)
        return replace(cell, paper=paper)

    def average_of(method: str) -> Cell:
        cell = table.averages[method]
        if set(table.columns) != set(_paper_columns(dataset)) or not (cell.parts and cell.parts.complete):
            return cell
        source = None if dataset is None else "appendix"
        return replace(cell, paper=printed(rule, dataset or AVERAGE, printed_name(method), table=source))

    return replace(
        table,
        cells={(method, column): cell_of(method, column) for method, column in table.cells},
        averages={method: average_of(method) for method in table.methods},
    )


def printed_name(method: str) -> str:
    """The name under which the paper has a method's numbers; it has none of averaged weights, `ERM + SMA`."""
    algorithm = algorithm_of(method)
    return method if method.startswith(f"{algorithm} + ") else algorithm


def _paper_columns(dataset: str | None) -> tuple[str, ...]:
    """The columns that the paper's average is over: it leaves Spirals out of the average of datasets."""
    if dataset is not None:
        return environments(dataset)
    names = dict.fromkeys(cell.dataset for cell in printed_cells() if cell.table == "1")
    return tuple(name for name in names if name != AVERAGE)
