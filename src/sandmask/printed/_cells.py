"""The numbers that the paper prints: Tables 1, 2 and 3, and the appendix's table of each dataset."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

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
    text = files("sandmask.printed").joinpath("printed.csv").read_text(encoding="utf-8")
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
    """The paper's number for a cell; None where it has none.

    `printed("oracle", "PACS", "SANDMask", "A")` is a cell of the appendix, without the environment it is the
    dataset's average of Table 2, and `printed("oracle", "Avg", "SANDMask")` is the last column there. `table`
    asks for the number in one place, where the paper prints it in two.
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
