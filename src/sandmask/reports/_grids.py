"""Tables as text: headings, cells and notes, which every format shows."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sandmask._text import printable
from sandmask.reports._data import Cell, Change, Confusion, Report, RuleReport, Statistics, Table
from sandmask.reports.statistics import PairedComparison, fewest_values

NOT_RUN = "-"
_COMPARED = ("Difference", "95% interval", "p", "Pairs")
_LISTED_GAPS = 6
_STATISTICS_NOTE = (
    "Mean rank over environments (1 is best) of the methods that have them all. Difference in percent over "
    "(environment, trial) pairs, its 95% bootstrap interval, and the p-value of a sign-flip permutation test. Fewer "
    f"than {fewest_values()} pairs cannot support a 95% interval, so none is given."
)


@dataclass(frozen=True)
class Grid:
    """A table of text with a title, and notes below it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def grids(report: Report, *, statistics: bool = True) -> list[Grid]:
    """Return the report's tables in order: for each rule its datasets, the averages, the statistics.

    :param report: the report.
    :param statistics: include the comparisons with the baseline.
    """
    return [grid for rule in report.rules for _, grid in named_grids(rule, statistics=statistics)]


def named_grids(rule: RuleReport, *, statistics: bool = True) -> Iterator[tuple[str, Grid]]:
    """Yield the tables of one rule, each with a name.

    Names are `dataset:PACS`, `averages`, `metric:f1:PACS`, `confusion:ERM:PACS`, `changes`, `statistics` and `notes`.
    """
    for name, table in rule.datasets.items():
        yield f"dataset:{name}", _table_grid(table, rule, list(_table_notes(table)))
    if rule.averages is not None:
        is_diverged = any(cell.diverged for cell in rule.averages.cells.values())
        notes = ["† with runs that diverged; see the dataset's table."] if is_diverged else []
        yield "averages", _table_grid(rule.averages, rule, notes)
    for metric in rule.metrics:
        note = f"{metric.title}: {metric.description}."  # other missing runs are listed below the table of accuracies
        for name, table in metric.datasets.items():
            title = f"{table.title}, {metric.title}"
            notes = [note, *_table_notes(table, f"without {metric.metric}")]
            yield f"metric:{metric.metric}:{name}", _grid(title, rule, _header(table), _rows(table), notes)
    for confusion in rule.confusions:
        yield f"confusion:{confusion.method}:{confusion.dataset}", _confusion_grid(confusion, rule)
    if rule.changes:
        yield "changes", _changes_grid(rule.changes, rule)
    if rule.statistics is not None and rule.statistics.comparisons and statistics:
        yield "statistics", _statistics_grid(rule.statistics, rule)
    if rule.notes:
        yield "notes", _grid("Not reported", rule, (), (), rule.notes)


def _grid(
    title: str, rule: RuleReport, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> Grid:
    """Make a table of a rule. Control characters are escaped, because names come from files."""
    return Grid(
        printable(f"{title}, model selection: {rule.rule}"),
        tuple(map(printable, header)),
        tuple(tuple(map(printable, row)) for row in rows),
        tuple(map(printable, notes)),
    )


def _confusion_grid(confusion: Confusion, rule: RuleReport) -> Grid:
    rows = []
    for name, counts in zip(confusion.classes, confusion.counts, strict=True):
        total = sum(counts)
        shares = (f"{100 * count / total:.1f}" if total else NOT_RUN for count in counts)
        rows.append((name, *shares, str(total)))
    note = "Rows are true and columns predicted classes, in percent of the row. The last column counts examples."
    title = f"{confusion.dataset}, Confusion of {confusion.method}"
    return _grid(title, rule, ("Class", *confusion.classes, "Examples"), rows, [note])


def _header(table: Table) -> tuple[str, ...]:
    """Return the headings. On the HTML page, `cellAt` in tables.js finds the data of a cell by its column number."""
    return ("Algorithm", *table.columns, table.average_title)


def _rows(table: Table) -> Iterator[tuple[str, ...]]:
    for method in table.methods:
        cells = [*(table.cells[method, column] for column in table.columns), table.averages[method]]
        yield (method, *map(cell_text, cells))


def _table_grid(table: Table, rule: RuleReport, remarks: Sequence[str]) -> Grid:
    notes = list(table.notes)
    if any(cell.paper is not None for cell in (*table.cells.values(), *table.averages.values())):
        notes.append("[the paper's number, ours minus the paper's before rounding]")
    return _grid(table.title, rule, _header(table), _rows(table), [*notes, *remarks])


def cell_text(cell: Cell) -> str:
    """Format one cell: `81.2 ± 0.4`, with † for diverged runs and the counts of an incomplete cell.

    :param cell: the cell.
    """
    if not cell.expected:
        return NOT_RUN
    mark = "†" if cell.diverged else ""
    if cell.mean is None:
        text = f"{cell.have}/{cell.expected} runs{mark}"
    elif not math.isfinite(cell.mean):
        text = NOT_RUN
    else:
        text = f"{cell.mean:.1f}" + ("" if cell.error is None else f" ± {cell.error:.1f}") + mark
        partial = ", ".join(_partial(cell))
        text += f" ({partial})" if partial else ""
    if cell.before is not None and cell.before.mean is not None:
        change = "" if cell.change is None else f", {_signed(cell.change)}"
        text += f" [was {cell.before.mean:.1f}{change}]"
    if cell.paper is not None:
        difference = "" if cell.difference is None else f", {_signed(cell.difference)}"
        text += f" [{cell.paper.mean_digits}{difference}]"
    return text


def _partial(cell: Cell) -> Iterator[str]:
    """Yield the counts of columns and runs of a cell that lacks some of them."""
    parts = cell.parts
    if parts is not None and not parts.complete:
        yield f"{parts.found}/{parts.of} {parts.kind}" if parts.found < parts.of else "in part"
    if cell.have != cell.expected:
        yield f"{cell.have}/{cell.expected} runs"


def _signed(difference: float) -> str:
    """Format a difference with its sign; -0.0 becomes +0.0."""
    return f"{difference:+z.1f}"


def _table_notes(table: Table, why: str | None = None) -> Iterator[str]:
    """Yield notes on diverged and missing runs; with `why`, only on runs that are missing for this reason.

    Equal notes on several columns of a method are merged.
    """
    columns: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (method, column), cell in table.cells.items():
        for mark, text in _cell_notes(cell, why):
            columns[mark, method, text].append(column)
    for (mark, method, text), names in columns.items():
        is_whole_row = len(names) == len(table.columns) > _LISTED_GAPS
        where = f"all {len(names)} columns" if is_whole_row else _listed(names, ", ", " and")
        yield f"{mark}{method}, {where}: {text}."


def _cell_notes(cell: Cell, why: str | None) -> Iterator[tuple[str, str]]:
    """Yield notes on one cell, each with its mark."""
    diverged = [text for trial in cell.trials for text in trial.diverged]
    if diverged and why is None:
        yield "† ", f"diverged: {_listed(diverged)}"
    gaps = [gap for trial in cell.trials for gap in trial.gaps if why in (None, gap.why)]
    if gaps:
        nothing = len(gaps) == cell.expected and not any(gap.why for gap in gaps)
        places = [f"trial {gap.trial_seed} draw {gap.hparams_seed}{gap.why and f' ({gap.why})'}" for gap in gaps]
        yield "", "no runs" if nothing else f"missing: {_listed(places)}"


def _listed(items: Sequence[str], separator: str = "; ", last: str = "; and") -> str:
    more = len(items) - _LISTED_GAPS
    return separator.join(items[:_LISTED_GAPS]) + (f"{last} {more} more" if more > 0 else "")


def _changes_grid(changes: Sequence[Change], rule: RuleReport) -> Grid:
    rows = [(each.dataset, each.method, *_compared(each.compared)) for each in changes]
    note = (
        "Now minus before in percent, over the (environment, trial) pairs of both sets of runs, its 95% bootstrap "
        "interval, and the p-value of a sign-flip permutation test."
    )
    others = [f"{each.dataset}, {each.method}: {'; '.join(each.settings)}." for each in changes if each.settings]
    return _grid("Compared with before", rule, ("Dataset", "Algorithm", *_COMPARED), rows, [note, *others])


def _compared(against: PairedComparison | None) -> tuple[str, ...]:
    if against is None:
        return (NOT_RUN,) * len(_COMPARED)
    interval = NOT_RUN if against.interval is None else " to ".join(map(_signed, against.interval))
    p_value = "<0.001" if against.p_value < 0.001 else f"{against.p_value:.3f}"
    return (_signed(against.difference), interval, p_value, str(against.pairs))


def _statistics_grid(statistics: Statistics, rule: RuleReport) -> Grid:
    rows = []
    for item in statistics.comparisons:
        rank = NOT_RUN if item.mean_rank is None else f"{item.mean_rank:.2f}"
        rows.append((item.scope, item.method, rank, *_compared(item.against_baseline)))
    critical = [
        f"{scope}: mean ranks closer than {value:.2f} are not significantly different (Nemenyi, 0.05)."
        for scope, value in statistics.critical_differences.items()
    ]
    header = ("Dataset", "Algorithm", "Mean rank", *_COMPARED)
    return _grid(f"Compared with {statistics.baseline}", rule, header, rows, [_STATISTICS_NOTE, *critical])
