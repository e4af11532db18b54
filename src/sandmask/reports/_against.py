"""Two sets of runs, before and after: the earlier number beside each cell, and the change on pairs of trials."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sandmask.errors import SandmaskError
from sandmask.reports._data import Before, Cell, Change, MetricReport, Report, RuleReport, Table
from sandmask.reports.statistics import paired_comparison


def beside_earlier(report: Report, earlier: Report) -> Report:
    """The same report with the number of an earlier one in every cell that both have.

    :param report: the later report.
    :param earlier: a report of other runs under the same selection rules.
    """
    rules = [_rule(now, then) for now, then in zip(report.rules, earlier.rules, strict=True)]
    if not any(rule.changes for rule in rules):
        raise SandmaskError(
            "The two sets of runs have no dataset, method and held-out environment in common, so there is nothing to "
            "compare. A method is the same if its algorithm and settings are."
        )
    return replace(report, rules=tuple(rules))


def _rule(now: RuleReport, then: RuleReport) -> RuleReport:
    both = [name for name in now.datasets if name in then.datasets]
    averages = now.averages
    if averages is not None and then.averages is not None:
        averages = _beside(averages, then.averages)
    return replace(
        now,
        datasets=_tables(now.datasets, then.datasets),
        averages=averages,
        metrics=tuple(_metrics(now.metrics, then.metrics)),
        changes=tuple(change for name in both for change in _changes(name, now.datasets[name], then.datasets[name])),
    )


def _metrics(now: tuple[MetricReport, ...], then: tuple[MetricReport, ...]) -> Iterator[MetricReport]:
    earlier = {metric.metric: metric.datasets for metric in then}
    for metric in now:
        yield replace(metric, datasets=_tables(metric.datasets, earlier.get(metric.metric, {})))


def _tables(now: Mapping[str, Table], then: Mapping[str, Table]) -> dict[str, Table]:
    return {name: _beside(table, then[name]) if name in then else table for name, table in now.items()}


def _beside(now: Table, then: Table) -> Table:
    return replace(
        now,
        cells={key: _cell(cell, then.cells.get(key)) for key, cell in now.cells.items()},
        averages={method: _cell(cell, then.averages.get(method)) for method, cell in now.averages.items()},
    )


def _cell(now: Cell, then: Cell | None) -> Cell:
    """Averages compare where they are over the same number of columns."""
    if then is None or then.mean is None or (now.parts and then.parts and now.parts.found != then.parts.found):
        return now
    return replace(now, before=Before(then.mean, then.error))


def _changes(dataset: str, now: Table, then: Table) -> Iterator[Change]:
    for method in now.methods:
        after, before = _trials(now, method), _trials(then, method)
        pairs = sorted(after.keys() & before.keys())
        if pairs:
            compared = paired_comparison([after[key] for key in pairs], [before[key] for key in pairs])
            yield Change(dataset, method, compared)


def _trials(table: Table, method: str) -> dict[tuple[str, int], float]:
    """Accuracies in percent by environment and trial."""
    return {
        (column, trial.trial_seed): 100 * trial.selected.test_accuracy
        for column in table.columns
        for trial in (table.cells[method, column].trials if (method, column) in table.cells else ())
        if trial.selected is not None
    }
