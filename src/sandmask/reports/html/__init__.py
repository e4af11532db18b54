"""The report as one HTML file with tables, comparisons and the curves of all runs. It works offline.

    from sandmask.reports.html import write_html
    write_html(read_runs("runs"), "report.html")

The page consists of `assets/` (a template, styles and scripts) and of data computed in Python: its numbers are those of
`build_report`, and the text of its tables is that of `render`.
"""

from sandmask.reports.html._page import render_html, write_html

__all__ = ["render_html", "write_html"]
