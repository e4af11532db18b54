"""Tables of results from records. The data are computed first, and then formatted.

    import sandmask
    from sandmask.reports import render
    tables = sandmask.report("runs", against_paper=True)
    print(render(tables, "markdown"))

`build_report` does the same for runs in memory.
`tables.rules[0].datasets["PACS"].cells["SANDMask", "A"]` is a cell with its trials, interval and gaps.
"""

from sandmask.reports._data import Cell, Comparison, Gap, Report, RuleReport, Statistics, Table, Trial
from sandmask.reports._for_programs import run_command
from sandmask.reports._formats import FORMATS, Format, latex, markdown, render, text
from sandmask.reports._grids import Grid, cell_text, grids
from sandmask.reports._report import build_report, report

__all__ = [
    "FORMATS",
    "Cell",
    "Comparison",
    "Format",
    "Gap",
    "Grid",
    "Report",
    "RuleReport",
    "Statistics",
    "Table",
    "Trial",
    "build_report",
    "cell_text",
    "grids",
    "latex",
    "markdown",
    "render",
    "report",
    "run_command",
    "text",
]
