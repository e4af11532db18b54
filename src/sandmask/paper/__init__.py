"""The reproduction of the paper: its printed numbers, and modules for its figures and tables.

    from sandmask.paper import printed
    printed("training-domain", "Spirals", "ANDMask").mean       # 88.0, Table 3

The rest of sandmask works without this package. `commands` implements `sandmask paper`.
"""

from sandmask.paper._printed import (
    AVERAGE,
    Inconsistency,
    PrintedCell,
    algorithms,
    datasets,
    environments,
    inconsistencies,
    printed,
    printed_cells,
)

__all__ = [
    "AVERAGE",
    "Inconsistency",
    "PrintedCell",
    "algorithms",
    "datasets",
    "environments",
    "inconsistencies",
    "printed",
    "printed_cells",
]
