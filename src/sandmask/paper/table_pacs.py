"""PACS with a network at hand: a table of its own, because it is not the paper's ResNet-50."""

from collections.abc import Sequence

from sandmask.datasets import DATASETS
from sandmask.errors import SandmaskError
from sandmask.paper._compare import RULES
from sandmask.paper._product import Product
from sandmask.paper._tables import table_product
from sandmask.records import RunRecord

TITLE = "PACS with another network"
CONFIGS = ("pacs",)


def table_pacs(runs: Sequence[RunRecord], *, draws: int | None = None, trials: int | None = None) -> Product:
    """The PACS runs of every network but the paper's; the printed numbers are there for orientation only."""
    protocol = DATASETS["PACS"].network
    mine = [run for run in runs if run.spec.dataset == "PACS" and run.spec.network != protocol]
    if not mine:
        raise SandmaskError(f"There are no runs on PACS with another network than {protocol} among these records.")
    networks = ", ".join(sorted({run.spec.network for run in mine}))
    steps = ", ".join(f"{count:,}" for count in sorted({run.spec.steps for run in mine}))
    note = (
        f"Not the paper's table: {networks} in place of {protocol}, {steps} steps. The paper's numbers (in brackets) "
        "are of another network, and a difference says nothing about the method."
    )
    how = {"draws": draws, "trials": trials}
    return table_product("table-pacs", TITLE, mine, ["PACS"], RULES, **how, notes=(note,), comparable=False)
