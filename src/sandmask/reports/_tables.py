"""Tables of accuracies: select a run per trial, average the trials of a cell, and find the best cell of a column."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sandmask._text import printable
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.records._types import held_out_environments
from sandmask.reports._data import Cell, Gap, Parts, Table, Trial
from sandmask.reports._notes import Groups, notes_on_adaptation, table_notes
from sandmask.reports.statistics import bootstrap_interval, mean_and_error
from sandmask.selection import (
    SEARCH,
    GroupKey,
    Selected,
    SelectionRule,
    algorithm_of,
    is_searched,
    is_settled,
    is_soup,
    select,
    siblings,
)

# The order of methods in DomainBed's tables, which papers follow; the masks come last there.
_CUSTOMARY = (
    "ERM", "IRM", "GroupDRO", "Mixup", "MLDG", "CORAL", "MMD", "DANN", "CDANN", "MTL", "SagNet", "ARM", "VREx", "RSC",
    "ANDMask", "SANDMask",
)  # fmt: skip


def method_order(methods: Iterable[str]) -> tuple[str, ...]:
    """Sort methods: the order of DomainBed's tables, then alphabetically; soups and ensembles come last."""
    places = {name: place for place, name in enumerate(_CUSTOMARY)}
    return tuple(sorted(methods, key=lambda name: (is_soup(name), places.get(algorithm_of(name), len(places)), name)))


def is_of(method: str, name: str) -> bool:
    """Whether `name` is the name of a method or of its algorithm."""
    return name in (method, algorithm_of(method))


@dataclass(frozen=True)
class Expected:
    """The environments, trials and draws of a dataset's complete cells."""

    environments: tuple[str, ...]
    reported: tuple[str, ...]  # the environments that a complete table has
    trials: tuple[int, ...]
    draws: tuple[int, ...]
    proposals: tuple[int, ...]  # of a search, instead of draws
    chance: float | None  # the accuracy of guessing, in percent; None if records do not name the classes


def expected_of(runs: Sequence[RunRecord], draws: int | None, trials: int | None) -> Expected:
    """Return the expected content of complete cells; by default, all draws and trials of any run on the dataset."""
    names = runs[0].env_names
    for run in runs:
        if run.env_names != names:
            raise SandmaskError(
                f"Runs of dataset {run.spec.dataset!r} name different environments: {printable(', '.join(names))} and "
                f"{printable(', '.join(run.env_names))}. They are not one dataset: report them from separate folders."
            )
    seen_trials = sorted({run.spec.trial_seed for run in runs})
    drawn = [run for run in runs if "soup" not in run.spec.options] or runs
    seen_draws = sorted({run.spec.hparams_seed for run in drawn if SEARCH not in run.spec.options})
    proposed = sorted({run.spec.hparams_seed for run in drawn if SEARCH in run.spec.options})
    classes = max(len(run.classes) for run in runs)
    return Expected(
        environments=names,
        reported=_reported(runs[0].spec.dataset, names),
        trials=tuple(seen_trials if trials is None else range(trials)),
        draws=tuple(seen_draws if draws is None else range(draws)),
        proposals=tuple(proposed if draws is None else range(draws)),
        chance=100 / classes if classes else None,
    )


def _reported(dataset: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the environments that a sweep holds out by default, so averages over fewer are marked as partial.

    These are all but the last one of Spirals, the first one of Spawrious, and all environments of other datasets.
    """
    if dataset.startswith("Spirals:"):  # with parameters, such as another number of environments
        return names[:-1]
    if dataset.startswith("Spawrious") and names[0] == "Test":
        return names[:1]
    known = held_out_environments(dataset)
    return known if known and known == names[: len(known)] else names


def _trials(
    rule: SelectionRule, groups: Groups, dataset: str, expected: Expected
) -> dict[tuple[str, str], tuple[Trial, ...]]:
    """Return the trials of a dataset by method and held-out environment."""
    found = {}
    for method in sorted({key.method for key in groups if key.dataset == dataset}):
        draws = expected.proposals if is_searched(method) else expected.draws
        draws = (0,) if is_soup(method) else draws  # all draws make one soup
        for env, name in enumerate(expected.environments):
            keys = [GroupKey(dataset, method, env, trial) for trial in expected.trials]
            found[method, name] = tuple(_trial(rule, groups.get(key, ()), key, draws) for key in keys)
    return found


def _trial(rule: SelectionRule, runs: Sequence[RunRecord], key: GroupKey, draws: Sequence[int]) -> Trial:
    """Apply a rule to one trial's runs of a cell, and list the runs that are missing or diverged."""
    alone = [run for run in runs if run.spec.test_envs == (key.test_env,)]
    of_draw: defaultdict[int, list[RunRecord]] = defaultdict(list)
    for run in alone:
        of_draw[run.spec.hparams_seed].append(run)
    gaps = []
    for draw in draws:
        why = _why_missing(rule, of_draw[draw], runs)
        if why is not None:
            gaps.append(Gap(key.trial_seed, draw, why))
    selected = select(rule, runs, key.test_env)
    if selected is None and not gaps and any(run.status == "done" for run in alone):
        gaps = [Gap(key.trial_seed, draw, "the rule selects no checkpoint") for draw in draws]
    considered = [run for run in runs if rule.needs_pairs or len(run.spec.test_envs) == 1]
    diverged = [
        f"trial {run.spec.trial_seed} draw {run.spec.hparams_seed} at step {run.diverged_at}"
        for run in considered
        if run.status == "diverged"
    ]
    return Trial(key.trial_seed, selected, len(draws), tuple(gaps), tuple(diverged))


def _why_missing(rule: SelectionRule, drawn: Sequence[RunRecord], runs: Sequence[RunRecord]) -> str | None:
    """None if the rule can judge the run of a draw; otherwise the reason, or "" if there is no run."""
    if not drawn:
        return ""
    unfinished = [_progress(run) for run in drawn if not is_settled(run)]
    if unfinished:
        return unfinished[0]
    run = drawn[-1]
    if rule.lacks(run):
        return f"without {rule.needed}"
    if not rule.needs_pairs:
        return None
    pairs = siblings(run, runs)
    for environment in run.train_envs:
        found = [pair for pair in pairs if environment in pair.spec.test_envs]
        if len(found) != 1:
            number = "no run holds" if not found else f"{len(found)} runs hold"
            return f"{number} out {run.env_names[environment]} as well"
        if not is_settled(found[0]):
            return f"with {run.env_names[environment]} {_progress(found[0])}"
    return None


def _progress(run: RunRecord) -> str:
    at = int(run.steps[-1]) if len(run.steps) else 0
    return f"at step {at} of {run.spec.steps}"


def dataset_table(rule: SelectionRule, groups: Groups, dataset: str, expected: Expected) -> Table:
    """Make the table of a dataset: methods by held-out environments, without those that no run holds out."""
    trials = _trials(rule, groups, dataset, expected)
    methods = method_order({method for method, _ in trials})
    columns = [name for name in expected.environments if any(_tried(trials[method, name]) for method in methods)]
    absent = [name for name in expected.reported if name not in columns]
    cells = {
        (method, column): value_cell(trials[method, column], _accuracies(trials[method, column]))
        for method in methods
        for column in columns
    }
    return Table(
        title=dataset,
        methods=methods,
        columns=tuple(columns),
        cells=cells,
        averages=row_means(methods, columns, cells, len(columns) + len(absent), "environments"),
        notes=tuple(table_notes(dataset, methods, absent, groups)),
        chances={} if expected.chance is None else dict.fromkeys(columns, expected.chance),
    )


def _tried(trials: Sequence[Trial]) -> bool:
    return any(len(trial.gaps) < trial.expected or any(gap.why for gap in trial.gaps) for trial in trials)


def _accuracies(trials: Sequence[Trial]) -> list[float]:
    return [trial.selected.test_accuracy for trial in trials if trial.selected is not None]


def value_cell(trials: Sequence[Trial], values: Sequence[float]) -> Cell:
    """Make a cell from the values (in 0..1) of its trials. Without values, its mean is None."""
    mean, error = mean_and_error(values) if values else (None, None)
    if len(values) == 1:
        error = None  # unknown for one trial, for which DomainBed prints 0.0
    interval = bootstrap_interval(values)
    expected = sum(trial.expected for trial in trials)
    return Cell(
        mean=mean,
        error=error,
        interval=None if interval is None else (100 * interval[0], 100 * interval[1]),
        values=tuple(100 * value for value in values),
        trials=tuple(trials),
        have=expected - sum(len(trial.gaps) for trial in trials),
        expected=expected,
        diverged=sum(len(trial.diverged) for trial in trials),
    )


def _mean_cell(row: Mapping[str, Cell], of: int, kind: str) -> Cell:
    """Average the numbers of a row, without an error, as the paper and DomainBed do.

    :param of: number of columns of this `kind` in a complete average.
    """
    cells = row.values()
    means = {column: cell.mean for column, cell in row.items() if cell.mean is not None}
    in_part = any(_is_in_part(row[column]) for column in means)
    return Cell(
        mean=sum(means.values()) / len(means) if means else None,
        have=sum(cell.have for cell in cells),
        expected=sum(cell.expected for cell in cells),
        diverged=sum(cell.diverged for cell in cells),
        parts=Parts(len(means), of, kind, in_part, tuple(_column_name(column, row[column]) for column in means)),
    )


def _is_in_part(cell: Cell) -> bool:
    return cell.parts is not None and not cell.parts.complete


def _column_name(column: str, cell: Cell) -> str:
    """Return the name of a column, followed by its own columns if it is a partial average."""
    return f"{column} ({', '.join(cell.parts.columns)})" if cell.parts is not None and _is_in_part(cell) else column


def row_means(
    methods: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], Cell], of: int, kind: str
) -> dict[str, Cell]:
    """Average the row of each method with `_mean_cell`."""
    return {method: _mean_cell({column: cells[method, column] for column in columns}, of, kind) for method in methods}


def averages_table(tables: Mapping[str, Table]) -> Table:
    """Make the table of averages: methods by datasets."""
    methods = method_order({method for table in tables.values() for method in table.methods})
    cells = {
        (method, dataset): _dataset_average(table, method) for dataset, table in tables.items() for method in methods
    }
    return Table(
        title="Averages",
        methods=methods,
        columns=tuple(tables),
        cells=cells,
        averages=row_means(methods, list(tables), cells, len(tables), "datasets"),
        notes=tuple(notes_on_adaptation(methods)),
        chances={name: table.chances[table.columns[0]] for name, table in tables.items() if table.chances},
    )


def _dataset_average(table: Table, method: str) -> Cell:
    """Make a cell of the table of averages: each trial's mean over environments, then mean and error over trials.

    If a trial lacks an environment, the cell is the average of the method's row in the dataset's table, without error.
    """
    if method not in table.methods or not table.columns:
        return Cell(mean=None)
    average = table.averages[method]
    rows = [table.cells[method, column].trials for column in table.columns]
    everything = tuple(trial for row in rows for trial in row)
    if any(trial.selected is None for trial in everything):
        return replace(average, trials=everything)
    accuracies = [float(np.mean(_accuracies(same_trial))) for same_trial in zip(*rows, strict=True)]
    return replace(value_cell(everything, accuracies), parts=average.parts)


def selections(table: Table, method: str) -> dict[tuple[str, int], Selected]:
    """Return the selected runs and checkpoints of a method, by environment and trial."""
    return {
        (column, trial.trial_seed): trial.selected
        for column in table.columns
        for trial in table.cells[method, column].trials
        if trial.selected is not None
    }


def trial_accuracies(table: Table, method: str) -> dict[tuple[str, int], float]:
    """Return the accuracies of the selected checkpoints in percent, by environment and trial, without NaN."""
    found = {key: 100 * selected.test_accuracy for key, selected in selections(table, method).items()}
    return {key: accuracy for key, accuracy in found.items() if math.isfinite(accuracy)}


BEST_NOTE = (
    "Bold: the highest number of a column, if it is above chance and no other number of the column rounds to the same."
)


def best_cells(table: Table) -> set[tuple[str, str | None]]:
    """Return the (method, column) of each column's best cell; None is the column of averages."""
    found: set[tuple[str | None, str | None]] = set()
    lowest = table.lower_is_better
    for column in table.columns:
        cells = {method: table.cells[method, column] for method in table.methods}
        best = best_method(cells, table.chances.get(column), lowest=lowest)
        found.add((best, column))
    known = [table.chances[column] for column in table.columns if column in table.chances]
    chance = sum(known) / len(known) if known and len(known) == len(table.columns) else None
    found.add((best_method(table.averages, chance, lowest=lowest), None))
    return {(method, column) for method, column in found if method is not None}


def best_method(cells: Mapping[str, Cell], chance: float | None, *, lowest: bool = False) -> str | None:
    """Return the method with the highest (or `lowest`) mean of a column.

    It is None if the best printed number occurs twice, is not above chance, or is the only one. Of averages, only those
    over the most columns are compared, and only if they are over the same columns.
    """
    means = {method: cell.mean for method, cell in cells.items() if cell.mean is not None and math.isfinite(cell.mean)}
    widest = max((_columns(cells[method]) for method in means), default=0)
    shown = {method: round(mean, 1) for method, mean in means.items() if _columns(cells[method]) == widest}
    over = {parts.columns for method in shown if (parts := cells[method].parts) is not None}
    if len(shown) < 2 or len(over) > 1:
        return None
    best = min(shown.values()) if lowest else max(shown.values())
    first, *others = [method for method, mean in shown.items() if mean == best]
    is_above_chance = chance is None or best > round(chance, 1)
    return first if is_above_chance and not others else None


def _columns(cell: Cell) -> int:
    return cell.parts.found if cell.parts is not None else 1
