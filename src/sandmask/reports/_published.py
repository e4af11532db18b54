"""Published numbers next to ours. The library itself has none; `sandmask.paper` provides them."""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from sandmask.errors import SandmaskError
from sandmask.reports._data import Report, Table

GUEST = "sandmask.paper"
BESIDE = "_beside"  # its module with `beside_paper`


class _Guest(Protocol):
    def beside_paper(self, table: Table, rule: str, dataset: str | None) -> Table: ...


def has_published() -> bool:
    """Whether the numbers of the paper are installed."""
    return find_spec(GUEST) is not None


def beside_published(report: Report) -> Report:
    """The same report with the paper's number in every cell that has one."""
    if not has_published():
        raise SandmaskError(f"The paper's numbers are in {GUEST}, which is not installed. Leave out --against-paper.")
    guest: _Guest = import_module(f"{GUEST}.{BESIDE}")
    rules = []
    for rule in report.rules:
        tables = {name: guest.beside_paper(table, rule.rule, name) for name, table in rule.datasets.items()}
        averages = None if rule.averages is None else guest.beside_paper(rule.averages, rule.rule, None)
        rules.append(replace(rule, datasets=tables, averages=averages))
    return replace(report, rules=tuple(rules))
