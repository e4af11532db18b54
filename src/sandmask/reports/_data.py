"""The data of a report, which is computed before any format is written."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sandmask._text import counted
from sandmask.records import RunRecord
from sandmask.reports.statistics import PairedComparison
from sandmask.selection import Selected

if TYPE_CHECKING:
    import pandas as pd


AVERAGE = "Avg"  # in the place of an environment or a dataset


class PublishedCell(Protocol):
    """A published number in percent, with its digits as printed and the table that contains it."""

    @property
    def mean(self) -> float: ...
    @property
    def error(self) -> float | None: ...
    @property
    def mean_digits(self) -> str: ...
    @property
    def table(self) -> str: ...


@dataclass(frozen=True)
class Gap:
    """A run of a cell that is missing or not finished; `why` is empty if there is no record of it."""

    trial_seed: int
    hparams_seed: int
    why: str = ""


@dataclass(frozen=True)
class Trial:
    """One trial of one cell: the selected run, and the runs that are missing or diverged."""

    trial_seed: int
    selected: Selected | None
    expected: int
    gaps: tuple[Gap, ...] = ()
    diverged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The columns of an average: `found` of `of` columns of this kind ("environments", "datasets" or "classes").

    `in_part` is true if some of the columns found are themselves averages over too few columns. `columns` are the names
    of the columns found, because averages over different columns cannot be compared.
    """

    found: int
    of: int
    kind: str
    in_part: bool = False
    columns: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.found == self.of and not self.in_part


@dataclass(frozen=True)
class Cell:
    """A number of a table, in percent. `mean` is None if too many runs are missing.

    `values` are the accuracies of the trials (in percent), of which `mean` is the mean. `have` of the `expected` runs
    are finished. If some are missing, the number is provisional, and tables mark it. `parts` describes the columns of
    an average; tables also mark averages that lack columns. `before` is the same cell in an earlier set of runs.
    """

    mean: float | None
    error: float | None = None
    interval: tuple[float, float] | None = None
    values: tuple[float, ...] = ()
    trials: tuple[Trial, ...] = ()
    have: int = 0
    expected: int = 0
    diverged: int = 0
    paper: PublishedCell | None = None
    parts: Parts | None = None
    before: "Cell | None" = None

    @property
    def complete(self) -> bool:
        """Whether all expected runs are finished, and an average is over all columns."""
        return self.mean is not None and self.have == self.expected and (self.parts is None or self.parts.complete)

    @property
    def change(self) -> float | None:
        """This number minus the earlier one, in percentage points."""
        before = None if self.before is None else self.before.mean
        return _minus(self.mean, before)

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's, in percentage points."""
        return _minus(self.mean, None if self.paper is None else self.paper.mean)


def _minus(now: float | None, other: float | None) -> float | None:
    """The difference of two numbers; None if one is missing or NaN."""
    return None if now is None or other is None or not math.isfinite(now - other) else now - other


@dataclass(frozen=True)
class Table:
    """Methods by columns (environments, or datasets), and the average over the columns."""

    title: str
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]  # by method and column
    averages: Mapping[str, Cell]  # by method
    notes: tuple[str, ...] = ()
    chances: Mapping[str, float] = field(default_factory=dict)  # by column, in percent, where classes are known
    lower_is_better: bool = False

    @property
    def average_title(self) -> str:
        """The heading of the averages: "Avg", or "Avg of columns" if a column has that name."""
        return AVERAGE if AVERAGE not in self.columns else f"{AVERAGE} of columns"


@dataclass(frozen=True)
class MetricReport:
    """A metric beyond accuracy under one selection rule, with a table for each dataset."""

    metric: str
    title: str
    description: str
    datasets: Mapping[str, Table]


@dataclass(frozen=True)
class Confusion:
    """Examples of held-out environments, counted by true class (rows) and predicted class, over all trials."""

    dataset: str
    method: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """A method against the baseline on one dataset or on all, in percent."""

    scope: str
    method: str
    mean_rank: float | None
    against_baseline: PairedComparison | None  # None for the baseline itself, and where no pair is complete


@dataclass(frozen=True)
class Statistics:
    """Comparisons with the baseline, and the critical difference of mean ranks for each scope."""

    baseline: str
    comparisons: tuple[Comparison, ...]
    critical_differences: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """The change of a method on a dataset: now minus before, over the (environment, trial) pairs of both sets of runs.

    `settings` are the settings, and the hyperparameters set by hand, in which the two sets differ, such as "steps 300,
    before 100".
    """

    dataset: str
    method: str
    compared: PairedComparison
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleReport:
    """The tables, comparisons and notes of one selection rule."""

    rule: str
    description: str
    datasets: Mapping[str, Table]
    averages: Table | None
    statistics: Statistics | None
    notes: tuple[str, ...] = ()
    metrics: tuple[MetricReport, ...] = ()
    confusions: tuple[Confusion, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Report:
    """All tables of a set of runs. `print` shows them as text, and a notebook as HTML tables.

    `records` are the runs and `settings` the arguments of `build_report` except the rules; `to_html` needs both.
    """

    runs: int
    rules: tuple[RuleReport, ...]
    records: Sequence[RunRecord] = field(default=(), repr=False, compare=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def frame(self) -> "pd.DataFrame":
        """Return a data frame with an unrounded row for each cell. The columns are those of the CSV format."""
        from sandmask.reports._for_programs import to_frame

        return to_frame(self)

    def to_html(
        self,
        path: str | os.PathLike[str],
        selection: Sequence[str] | None = None,
        *,
        title: str = "sandmask report",
        statistics: bool = True,
    ) -> Path:
        """Write the HTML report: one file with tables, figures and every run's curves.

        :param path: the file to write.
        :param selection: the selection rules on the page; every rule if not given.
        :param title: the title of the page.
        :param statistics: include the comparisons with the baseline.
        :return: the path of the file.
        """
        from sandmask.reports.html import write_html

        return write_html(self.records, path, selection, title=title, statistics=statistics, **self.settings)

    def __repr__(self) -> str:
        return f"Report({counted(self.runs, 'run')}, {', '.join(rule.rule for rule in self.rules)})"

    def __str__(self) -> str:
        from sandmask.reports._formats import render

        return render(self)

    def _repr_html_(self) -> str:
        """Return the tables that a notebook shows."""
        from sandmask.reports._formats import html_tables
        from sandmask.reports._grids import grids

        return html_tables(grids(self))
