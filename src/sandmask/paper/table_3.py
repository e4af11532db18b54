"""Table 3 and its appendix: Spirals, sixteen held-out environments, both selection rules."""

from collections.abc import Sequence

from sandmask.paper._compare import RULES
from sandmask.paper._product import Product
from sandmask.paper._tables import as_protocol, table_product
from sandmask.records import RunRecord

TITLE = "Table 3: Spirals"
CONFIGS = ("spirals",)


def table_3(runs: Sequence[RunRecord], *, draws: int | None = 20, trials: int | None = 3) -> Product:
    """Averages and the sixteen environments, beside the printed ones."""
    mine = as_protocol(runs, "Spirals")
    return table_product("table-3", TITLE, mine, ["Spirals"], RULES, draws=draws, trials=trials)
