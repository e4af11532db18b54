"""The paper, reproduced: a guest of the library. Nothing else imports this package, and nothing else needs it.

It has a module for each figure and for the tables, the printed numbers that they are compared with, and the commands
of `sandmask paper`.

from sandmask.paper import printed
printed("training-domain", "Spirals", "ANDMask").mean       # 88.0, Table 3
"""

from sandmask.paper._printed import (
    AVERAGE,
    INCONSISTENCIES,
    SLIPS,
    Inconsistency,
    PrintedCell,
    Slip,
    algorithms,
    datasets,
    environments,
    printed,
    printed_cells,
)

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
