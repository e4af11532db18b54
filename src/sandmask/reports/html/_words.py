"""The tables in words, as the other formats have them: a page shows and downloads these, and rounds nothing itself."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from sandmask.reports._data import Report, RuleReport, Table
from sandmask.reports._grids import grids


def table_words(report: Report) -> dict[str, dict[str, Any]]:
    """For each rule, its tables by name: as they are, and under `paper` with the paper's numbers beside ours.

    Names are `dataset:PACS`, `averages`, `statistics` and `notes`. The report has to be made against the paper.
    """
    return {rule.rule: _rule_words(replace(report, rules=(rule,))) for rule in report.rules}


def _rule_words(report: Report) -> dict[str, Any]:
    (rule,) = report.rules
    plain = replace(report, rules=(_without_paper(rule),))
    pairs = zip(_names(rule), grids(plain), grids(report), strict=True)
    return {name: {**asdict(without), "paper": asdict(beside)} for name, without, beside in pairs}


def _names(rule: RuleReport) -> Iterator[str]:
    """What `grids` gives for a rule, in its order."""
    yield from (f"dataset:{name}" for name in rule.datasets)
    if rule.averages is not None:
        yield "averages"
    if rule.statistics is not None:
        yield "statistics"
    if rule.notes:
        yield "notes"


def _without_paper(rule: RuleReport) -> RuleReport:
    return replace(
        rule,
        datasets={name: _table_without(table) for name, table in rule.datasets.items()},
        averages=None if rule.averages is None else _table_without(rule.averages),
    )


def _table_without(table: Table) -> Table:
    return replace(
        table,
        cells={key: replace(cell, paper=None) for key, cell in table.cells.items()},
        averages={key: replace(cell, paper=None) for key, cell in table.averages.items()},
    )
