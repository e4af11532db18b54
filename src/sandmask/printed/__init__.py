"""The paper's printed numbers as data, and where they disagree with themselves.

from sandmask.printed import printed
printed("training-domain", "Spirals", "ANDMask").mean       # 88.0, Table 3
printed("oracle", "PACS", "SANDMask", "A")                  # a cell of the appendix
"""

from sandmask.printed._cells import (
    AVERAGE,
    PrintedCell,
    algorithms,
    datasets,
    environments,
    printed,
    printed_cells,
)
from sandmask.printed._inconsistencies import INCONSISTENCIES, SLIPS, Inconsistency, Slip

__all__ = [
    "AVERAGE",
    "INCONSISTENCIES",
    "SLIPS",
    "Inconsistency",
    "PrintedCell",
    "Slip",
    "algorithms",
    "datasets",
    "environments",
    "printed",
    "printed_cells",
]
