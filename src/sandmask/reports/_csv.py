"""A report as CSV: a line for each cell, with unrounded numbers."""

import csv
import io
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sandmask._text import printable
from sandmask.reports._data import AVERAGE, Cell, Report, RuleReport

if TYPE_CHECKING:
    import pandas as pd

HEADER = (
    "selection",
    "dataset",
    "method",
    "environment",
    "mean",
    "standard_error",
    "interval_low",
    "interval_high",
    "columns",
    "expected_columns",
    "runs",
    "expected_runs",
    "diverged_runs",
    "paper",
    "paper_standard_error",
    "difference_to_paper",
    "metric",
    "before",
    "before_standard_error",
    "change",
)
_ACCURACY = "accuracy"
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?|-")


def to_csv(report: Report) -> str:
    """Every cell of the tables; the environment "Avg" is a dataset's average, the dataset "Avg" that of all.

    Metrics beyond accuracy have lines of their own; of per-class accuracy, the environment is a class.
    """
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(HEADER)
    for *words, cell, metric in _lines(report):
        writer.writerow([*map(csv_word, words), *_numbers(cell), metric, *_before(cell)])
    return target.getvalue()


def to_frame(report: Report) -> "pd.DataFrame":
    """The same cells as a pandas frame, with names as they are and NaN where there is no number."""
    import pandas as pd

    rows = [(*words, *_numbers(cell), metric, *_before(cell)) for *words, cell, metric in _lines(report)]
    found = pd.DataFrame(rows, columns=list(HEADER))
    numbers = [name for name in HEADER[4:] if name != "metric"]
    return found.astype(dict.fromkeys(numbers, float))


def csv_word(word: str) -> str:
    """A word that no spreadsheet takes for a formula: an apostrophe comes before what could be one."""
    safe = printable(word)
    return f"'{safe}" if _FORMULA.match(safe) and not _NUMBER.fullmatch(safe) else safe


def _lines(report: Report) -> Iterator[tuple[str, str, str, str, Cell, str]]:
    for rule in report.rules:
        yield from ((rule.rule, *line, _ACCURACY) for line in _cells(rule))
        for metric in rule.metrics:
            for dataset, table in metric.datasets.items():
                for method in table.methods:
                    cells = [(column, table.cells[method, column]) for column in table.columns]
                    cells.append((AVERAGE, table.averages[method]))
                    yield from ((rule.rule, dataset, method, column, cell, metric.metric) for column, cell in cells)


def _cells(rule: RuleReport) -> Iterator[tuple[str, str, str, Cell]]:
    averages = rule.averages
    for dataset, table in rule.datasets.items():
        for method in table.methods:
            yield from ((dataset, method, column, table.cells[method, column]) for column in table.columns)
            if averages is not None:  # its cells have an error
                yield dataset, method, AVERAGE, averages.cells[method, dataset]
    if averages is not None and len(averages.columns) > 1:
        yield from ((AVERAGE, method, AVERAGE, averages.averages[method]) for method in averages.methods)


def _before(cell: Cell) -> tuple[float | None, ...]:
    before = cell.before
    return (None, None, None) if before is None else (before.mean, before.error, cell.change)


def _numbers(cell: Cell) -> tuple[float | str | None, ...]:
    low, high = cell.interval or (None, None)
    paper, parts = cell.paper, cell.parts
    numbers = (
        *(cell.mean, cell.error, low, high),
        *((None, None) if parts is None else (parts.found, parts.of)),
        *(cell.have, cell.expected, cell.diverged),
        *((None, None) if paper is None else (paper.mean, paper.error)),
        cell.difference,
    )
    return tuple(number if number is None or math.isfinite(number) else None for number in numbers)
