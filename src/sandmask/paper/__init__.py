"""The paper, remade: one module a figure or table, each with its data, its picture and its words.

`sandmask paper --help` lists them. The printed numbers that they are compared with are in `sandmask.printed`, and can
be had from here as well:

from sandmask.paper import printed
printed("training-domain", "Spirals", "ANDMask").mean       # 88.0, Table 3
"""

from sandmask.printed import (
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
