"""The formats of a report: plain text, Markdown, LaTeX, CSV and JSON; HTML tables for a notebook."""

import html
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandmask.registry import Registry
from sandmask.reports._data import Report
from sandmask.reports._for_programs import to_csv, to_json
from sandmask.reports._grids import Grid, grids

_WIDE = 140
_NOTE_WIDTH = 110


@dataclass(frozen=True)
class Format:
    """A format of reports. `render` takes the report and whether to show statistics."""

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
    """Format a report. JSON always contains the statistics, and CSV never does.

    :param report: the report.
    :param format_name: "text", "markdown", "latex", "csv" or "json".
    :param statistics: include the comparisons with the baseline.
    """
    return FORMATS[format_name].render(report, statistics)


def text(grids: Sequence[Grid]) -> str:
    """Format tables as plain text in aligned columns. Tables that are too wide are transposed if that helps.

    :param grids: the tables, from `grids`.
    """
    return "\n\n".join(_text_block(_turned_if_wide(grid)) for grid in grids) + "\n"


def _turned_if_wide(grid: Grid) -> Grid:
    if not grid.rows or sum(_widths(grid)) + 2 * len(grid.header) <= _WIDE or len(grid.header) <= len(grid.rows):
        return grid
    turned = tuple(zip(grid.header, *grid.rows, strict=True))
    return Grid(grid.title, ("", *turned[0][1:]), turned[1:], grid.notes)


def _widths(grid: Grid) -> list[int]:
    return [max(len(word) for word in column) for column in zip(grid.header, *grid.rows, strict=True)]


def _text_block(grid: Grid) -> str:
    lines = [grid.title]
    if grid.header:
        widths = _widths(grid)
        for row in (grid.header, tuple("-" * width for width in widths), *grid.rows):
            words = [row[0].ljust(widths[0])]
            words += [word.rjust(width) for word, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(words).rstrip())
    return "\n".join([*lines, *(textwrap.fill(note, _NOTE_WIDTH, subsequent_indent="  ") for note in grid.notes)])


_TAG = re.compile(r"<(?=[A-Za-z/!?])")  # the beginning of HTML in Markdown; "<0.001" is not HTML
_MARKS = re.compile(r"[\\*`~]|(?<![^\W_])_|_(?![^\W_])")  # emphasis, code and escapes; not the _ of weight_decay


def _plain_markdown(words: str) -> str:
    """Escape HTML, emphasis, links and images, so that Markdown shows the words as they are."""
    return _TAG.sub("&lt;", _MARKS.sub(r"\\\g<0>", words)).replace("](", "]\\(")


def markdown(grids: Sequence[Grid]) -> str:
    """Format tables as Markdown under headings.

    :param grids: the tables, from `grids`.
    """
    blocks = []
    for grid in grids:
        lines = [f"### {_plain_markdown(grid.title)}", ""]
        if grid.header:
            rows = [grid.header, ("---", *["---:"] * (len(grid.header) - 1)), *grid.rows]
            lines += [
                "| " + " | ".join(_plain_markdown(word).replace("|", "\\|") for word in row) + " |" for row in rows
            ]
            lines.append("")
        lines += [f"- {_plain_markdown(note)}" for note in grid.notes]
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks) + "\n"


_LATEX_WORDS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
}


def _escaped(words: str) -> str:
    escaped = "".join(_LATEX_WORDS.get(letter, letter) for letter in words)
    return re.sub(r"(?<!\w)-(?=\d)", r"$-$", escaped)  # a minus, not a hyphen


def latex(grids: Sequence[Grid]) -> str:
    """Format tables as LaTeX, for the booktabs and adjustbox packages.

    :param grids: the tables, from `grids`.
    """
    blocks = ["% \\usepackage{booktabs, adjustbox}"]
    for grid in grids:
        notes = [rf"\par\footnotesize {_escaped(note)}" for note in grid.notes]
        if not grid.header:
            blocks.append("\n".join([rf"\paragraph{{{_escaped(grid.title)}}}", *notes]))
            continue
        header = " & ".join(rf"\textbf{{{_escaped(word)}}}" for word in grid.header)
        blocks.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{_escaped(grid.title)}}}",
                    r"\adjustbox{max width=\textwidth}{%",
                    rf"\begin{{tabular}}{{l{'c' * (len(grid.header) - 1)}}}",
                    r"\toprule",
                    rf"{header} \\",
                    r"\midrule",
                    *(_row(row) for row in grid.rows),
                    r"\bottomrule",
                    r"\end{tabular}}",
                    *notes,
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(blocks) + "\n"


def _row(words: Sequence[str]) -> str:
    """Format a row. A name that begins with [ or * would otherwise become an argument of the previous line."""
    line = " & ".join(map(_escaped, words)) + r" \\"
    return f"{{}}{line}" if line.startswith(("[", "*")) else line


def html_tables(grids: Sequence[Grid]) -> str:
    """Format tables as HTML under headings, for a notebook. `sandmask.reports.html` makes the page."""
    blocks = []
    for grid in grids:
        blocks.append(f"<h4>{html.escape(grid.title)}</h4>")
        if grid.header:
            rows = [_html_row("th", grid.header), *(_html_row("td", row) for row in grid.rows)]
            blocks.append(f"<table>{''.join(rows)}</table>")
        blocks += [f"<p><small>{html.escape(note)}</small></p>" for note in grid.notes]
    return "\n".join(blocks)


def _html_row(tag: str, words: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(word)}</{tag}>' for word in words)}</tr>"
