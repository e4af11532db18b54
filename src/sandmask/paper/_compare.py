"""Compare our cells with the printed cells: difference, joint error and verdict."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sandmask.errors import SandmaskError
from sandmask.paper._printed import AVERAGE, PrintedCell, environments, printed, printed_name
from sandmask.records import RunRecord
from sandmask.reports import Cell, Grid, RuleReport, build_report, cell_text
from sandmask.reports.statistics import mean_and_error

# A method of the paper may have several forms here. Each form is compared with the printed row of the method.
PRINTED_AS = {
    "ANDMask-rescaled": "ANDMask",
    "SANDMask-rescaled": "SANDMask",
    "SANDMask-released": "SANDMask",
}
RULES = ("training-domain", "oracle")
MARKS = {"within": "=", "within two": "~", "beyond": "≠"}
LEGEND = (
    "[the paper's number]; = within the joint standard error √(ours² + paper's²), ~ within two of them, ≠ beyond; "
    "the rounding of the printed number is allowed for."
)
_ROUNDING = 0.05  # of a number printed with one digit after the point


@dataclass(frozen=True)
class Compared:
    """A cell of a table: our number and the paper's number."""

    rule: str
    dataset: str
    environment: str  # "Avg" for the dataset's average
    method: str
    ours: Cell
    paper: PrintedCell | None
    comparable: bool  # False if more than the method differs, such as the network

    @property
    def joint_error(self) -> float | None:
        """The standard error of the difference, in percentage points; None if one of the numbers has no error."""
        if self.ours.error is None or self.paper is None or self.paper.error is None:
            return None
        return math.hypot(self.ours.error, self.paper.error)

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's, in percentage points."""
        return None if self.ours.mean is None or self.paper is None else self.ours.mean - self.paper.mean

    @property
    def verdict(self) -> str:
        """ "within", "within two" or "beyond" the joint error; or the reason why there is no verdict."""
        if self.paper is None:
            return "not printed"
        if not self.comparable:
            return "not comparable"
        if self.difference is None or not self.ours.complete:
            return "incomplete"
        if self.joint_error is None:
            return "no error"
        off = abs(self.difference) - _ROUNDING
        return "within" if off <= self.joint_error else "within two" if off <= 2 * self.joint_error else "beyond"

    @property
    def words(self) -> str:
        """The text of the cell in a table."""
        text = ours_text(self.ours)
        if self.paper is None:
            return text
        error = f" ± {self.paper.error_digits}" if self.paper.error_digits else ""
        return f"{text} [{self.paper.mean_digits}{error}] {MARKS.get(self.verdict, '')}".rstrip()


def printed_row(method: str) -> str:
    """Return the name of the printed row of a method. For averaged weights (`ERM + SMA`), there is no such row."""
    return PRINTED_AS.get(printed_name(method), printed_name(method))


def shown(method: str) -> str:
    """Return a method's name in a table: `ERM (bf16)` for `ERM (precision=bf16)`."""
    return method.replace("precision=", "")


def ours_text(cell: Cell) -> str:
    """Format a cell as reports do. An average without a number shows how many of its environments there are."""
    parts = cell.parts
    if cell.expected and cell.mean is None and parts is not None and not parts.complete:
        return f"{parts.found}/{parts.of} environments"
    return cell_text(replace(cell, parts=None))


def compare(
    runs: Sequence[RunRecord],
    datasets: Sequence[str],
    rules: Sequence[str] = RULES,
    *,
    draws: int | None = None,
    trials: int | None = None,
    comparable: bool = True,
) -> list[Compared]:
    """Compare every cell of the tables of these datasets: environments first, then the average."""
    mine = [run for run in runs if run.spec.dataset in datasets and _is_in_tables(run)]
    if not mine:
        raise SandmaskError(f"There are no runs on {' or '.join(datasets)} among these records.")
    report = build_report(mine, list(rules), draws=draws, trials=trials)
    return [cell for rule in report.rules for cell in _rule_cells(rule, comparable)]


def _is_in_tables(run: RunRecord) -> bool:
    """Whether the paper's tables contain the environment that a run holds out: of Spirals, 16 of 17 environments."""
    columns = environments(run.spec.dataset)
    is_known = bool(columns) and columns == run.env_names[: len(columns)]
    return not is_known or len(run.spec.test_envs) != 1 or run.spec.test_envs[0] < len(columns)


def _rule_cells(rule: RuleReport, comparable: bool) -> Iterator[Compared]:
    for dataset, table in rule.datasets.items():
        for method in table.methods:
            cells = {column: table.cells[method, column] for column in table.columns}
            if rule.averages is not None:
                cells[AVERAGE] = provisional(rule.averages.cells[method, dataset], list(cells.values()))
            for column, cell in cells.items():
                paper = printed(rule.rule, dataset, printed_row(method), column)
                yield Compared(rule.rule, dataset, column, method, cell, paper, comparable)


def provisional(average: Cell, cells: Sequence[Cell]) -> Cell:
    """Give an incomplete average an error over trials, if each trial has all environments or none.

    The average stays marked as incomplete. It has no number if an environment is missing, because the paper's average
    is over all environments.
    """
    unknown = replace(average, mean=None, error=None)
    if average.parts is not None and average.parts.of > len(cells):
        return unknown
    if average.error is not None or average.complete or not average.expected:
        return average
    if any(cell.mean is None for cell in cells):
        return unknown
    means = []
    for trials in zip(*(cell.trials for cell in cells), strict=True):  # the same trial in each environment
        accuracies = [trial.selected.test_accuracy for trial in trials if trial.selected is not None]
        if len(accuracies) == len(cells):
            means.append(float(np.mean(accuracies)))
        elif accuracies:
            return average
    mean, error = mean_and_error(means)
    return replace(average, mean=mean, error=error if len(means) > 1 else None)


def cell_rows(cells: Sequence[Compared]) -> list[dict[str, object]]:
    """Return a row of a data frame for each cell."""
    return [
        {
            "selection": cell.rule,
            "dataset": cell.dataset,
            "environment": cell.environment,
            "method": cell.method,
            "ours": cell.ours.mean,
            "ours_error": cell.ours.error,
            "paper": None if cell.paper is None else cell.paper.mean,
            "paper_error": None if cell.paper is None else cell.paper.error,
            "difference": cell.difference,
            "joint_error": cell.joint_error,
            "verdict": cell.verdict,
            "runs": cell.ours.have,
            "runs_expected": cell.ours.expected,
            "diverged": cell.ours.diverged,
        }
        for cell in cells
    ]


def averages_grid(cells: Sequence[Compared], title: str, notes: Sequence[str]) -> Grid:
    """Make a table of averages, methods by datasets or by rules, as in the paper's main tables."""
    averages = [cell for cell in cells if cell.environment == AVERAGE]
    several = len({cell.dataset for cell in averages}) > 1
    columns = list(dict.fromkeys((cell.dataset if several else cell.rule) for cell in averages))
    found = {(cell.method, cell.dataset if several else cell.rule): cell for cell in averages}
    methods = list(dict.fromkeys(cell.method for cell in averages))
    rows = tuple(
        (shown(method), *(found[method, column].words if (method, column) in found else "-" for column in columns))
        for method in methods
    )
    legend = [LEGEND] if all(cell.comparable for cell in cells) else []
    diverged = {cell.method: cell.ours.diverged for cell in averages if cell.ours.diverged}
    if diverged:
        words = ", ".join(f"{count} of {method}" for method, count in diverged.items())
        legend.append(f"† with runs that diverged: {words}.")
    return Grid(title, ("Algorithm", *columns), rows, (*legend, *notes))


def environments_grid(cells: Sequence[Compared], title: str) -> Grid:
    """Make a table of environments by methods for one dataset and rule. The last row counts the verdicts."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    names = list(dict.fromkeys(cell.environment for cell in cells))
    found = {(cell.environment, cell.method): cell for cell in cells}
    rows = [(name, *(found[name, method].words for method in methods)) for name in names]
    if all(cell.comparable for cell in cells):
        rows.append(("within the joint error", *(_tally(cells, method) for method in methods)))
    return Grid(title, ("held out", *map(shown, methods)), tuple(rows))


def _tally(cells: Sequence[Compared], method: str) -> str:
    judged = [cell.verdict for cell in cells if cell.method == method and cell.environment != AVERAGE]
    complete = [verdict for verdict in judged if verdict in MARKS]
    return f"{complete.count('within')} of {len(complete)}" if complete else "-"
