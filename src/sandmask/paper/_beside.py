"""The paper's numbers in the cells of a report, for `sandmask report --against-paper`."""

from dataclasses import replace

from sandmask.paper._printed import AVERAGE, environments, printed, printed_cells
from sandmask.reports import Cell, Table
from sandmask.selection import algorithm_of


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
