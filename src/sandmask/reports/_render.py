"""The formats that a report comes in."""

from collections.abc import Callable
from dataclasses import dataclass

from sandmask.registry import Registry
from sandmask.reports._csv import to_csv
from sandmask.reports._data import Report
from sandmask.reports._formats import latex, markdown, text
from sandmask.reports._grids import grids
from sandmask.reports._json import to_json


@dataclass(frozen=True)
class Format:
    """A format by name; `render` is given the report and whether to show statistics."""

    name: str
    description: str
    render: Callable[[Report, bool], str]


FORMATS: Registry[Format] = Registry("report format")
FORMATS.register(Format("text", "aligned columns", lambda r, s: text(grids(r, statistics=s))))
FORMATS.register(Format("markdown", "pipe tables", lambda r, s: markdown(grids(r, statistics=s))))
FORMATS.register(Format("latex", "booktabs tables", lambda r, s: latex(grids(r, statistics=s))))
FORMATS.register(Format("csv", "a line for each cell, unrounded", lambda r, s: to_csv(r)))  # noqa: ARG005
FORMATS.register(Format("json", "everything, unrounded", lambda r, s: to_json(r)))  # noqa: ARG005


def render(report: Report, format_name: str = "text", *, statistics: bool = True) -> str:
    """A report in one of the formats. JSON always has the statistics, and CSV never has them."""
    return FORMATS[format_name].render(report, statistics)
