"""The report as one HTML file with tables, comparisons and the curves of all runs. It works offline.

    from sandmask.reports.html import write_html
    write_html(read_runs("runs"), "report.html")

The page is made of `assets/` (a template, styles, scripts) and of data that Python has computed: its numbers are
those of `build_report`, its words those of `render`.
"""

from sandmask.reports.html._page import render_html, write_html

__all__ = ["render_html", "write_html"]
