"""Table 2: test-domain validation (oracle), the columns that are at hand."""

from collections.abc import Sequence

from sandmask.paper._product import Product
from sandmask.paper._tables import as_protocol, table_product
from sandmask.paper.table_1 import columns
from sandmask.records import RunRecord

TITLE = "Table 2: test-domain validation (oracle)"
CONFIGS = ("colored_mnist", "rotated_mnist")


def table_2(runs: Sequence[RunRecord], *, draws: int | None = 20, trials: int | None = 3) -> Product:
    """The columns that the records have, with the paper's network only, beside the printed ones."""
    names = columns("2")
    mine = [run for name in names for run in as_protocol(runs, name)]
    return table_product("table-2", TITLE, mine, names, ["oracle"], draws=draws, trials=trials)
