"""Table 1: training-domain validation, the columns that are at hand."""

from collections.abc import Sequence

from sandmask.paper._product import Product
from sandmask.paper._tables import as_protocol, table_product
from sandmask.printed import AVERAGE, printed_cells
from sandmask.records import RunRecord

TITLE = "Table 1: training-domain validation"
CONFIGS = ("colored_mnist", "rotated_mnist")


def columns(table: str) -> tuple[str, ...]:
    """The datasets of one of the paper's two main tables, in order."""
    names = dict.fromkeys(cell.dataset for cell in printed_cells() if cell.table == table)
    return tuple(name for name in names if name != AVERAGE)


def table_1(runs: Sequence[RunRecord], *, draws: int | None = 20, trials: int | None = 3) -> Product:
    """The columns that the records have, with the paper's network only, beside the printed ones."""
    names = columns("1")
    mine = [run for name in names for run in as_protocol(runs, name)]
    return table_product("table-1", TITLE, mine, names, ["training-domain"], draws=draws, trials=trials)
