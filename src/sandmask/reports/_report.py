"""Create reports: `sandmask.report` from record files, and `build_report` from runs in memory."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sandmask._arguments import Names, PathLike, checked, names_in
from sandmask._arguments import paths as all_paths
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, judged_by_first_stage, read_runs, split_averages, trained
from sandmask.records._types import dataset_order
from sandmask.registry import closest
from sandmask.reports._comparisons import beside_earlier, beside_published, compare
from sandmask.reports._data import Report, RuleReport
from sandmask.reports._measures import confusions, metric_reports, reportable, shown_measures
from sandmask.reports._notes import Groups, changes_by_hand
from sandmask.reports._tables import Expected, averages_table, dataset_table, expected_of, is_of, method_order
from sandmask.selection import ACCURACY, RULES, SelectionRule, by_metric, find_rule, group_runs

DEFAULT_RULES = ("training-domain", "oracle")
BASELINE = "ERM"
MOST = 10_000  # draws or trials; JSON and the page list every missing one


@checked
def report(
    paths: PathLike | Iterable[PathLike],
    selection: Names | None = None,
    *,
    against_paper: bool = False,
    baseline: str = BASELINE,
    draws: int | None = None,
    trials: int | None = None,
    metrics: Names | None = None,
    select_by: str = ACCURACY,
    against: PathLike | None = None,
) -> Report:
    """Compute tables of the runs in folders of records: one for each dataset, the averages, and comparisons.

        tables = sandmask.report("runs/spirals")
        print(tables)                     # as `sandmask report` prints them
        tables.frame()                    # a row for each cell, unrounded
        tables.to_html("report.html")     # one page with every run's curves

    :param paths: a folder of records, a .jsonl file or an archive, or several of them.
    :param selection: a selection rule or several, or "all"; "training-domain" and "oracle" by default.
    :param against_paper: show the paper's number beside ours, with the difference.
    :param baseline: the method that others are compared with.
    :param draws: hyperparameter draws of a complete cell; as many as there are if not given.
    :param trials: trials of a complete cell; as many as there are if not given.
    :param metrics: recorded metrics beyond accuracy to show, or "all"; those that are a number for each environment if
        not given.
    :param select_by: what the rules select by: "accuracy", "f1", "ece" or "worst-group".
    :param against: a folder of earlier records. Each cell shows the earlier number and the change.
    """
    several = all_paths(paths)
    if not several:
        raise SandmaskError("A report needs at least one folder or file of records. Found none.")
    for name, value in (("draws", draws), ("trials", trials)):
        if value is not None and not 1 <= value <= MOST:
            raise SandmaskError(f"{name} should be from 1 to {MOST:,}. Found {value:,}.")
    return build_report(
        read_runs(*several),
        rule_names(selection, select_by),
        against_paper=against_paper,
        baseline=baseline,
        draws=draws,
        trials=trials,
        metrics=None if metrics is None else names_in(metrics),
        earlier=None if against is None else read_runs(against),
    )


def rule_names(selection: Names | None, select_by: str = ACCURACY) -> list[str]:
    """Return names of selection rules. If they select by a metric, "all" means those that can use a metric."""
    named: Sequence[str] = names_in(selection or ()) or DEFAULT_RULES
    if "all" in named:
        named = [name for name in RULES if select_by == ACCURACY or not RULES[name].needs_metrics]
    return list(dict.fromkeys(by_metric(find_rule(name), select_by).name for name in named))


def build_report(
    runs: Sequence[RunRecord],
    rules: Sequence[str] = ("training-domain",),
    *,
    against_paper: bool = False,
    baseline: str = BASELINE,
    draws: int | None = None,
    trials: int | None = None,
    metrics: Sequence[str] | None = None,
    earlier: Sequence[RunRecord] | None = None,
) -> Report:
    """Compute every table of a set of runs under each rule.

    Averages of weights are methods of their own, such as `ERM + SMA`.

    :param runs: records of the runs.
    :param rules: names of selection rules.
    :param against_paper: include the paper's numbers.
    :param baseline: method that the others are compared with.
    :param draws: number of draws in a complete cell; as many as there are if not given.
    :param trials: number of trials in a complete cell; as many as there are if not given.
    :param metrics: metrics beyond accuracy to include; the recorded ones that are a number for each environment if not
        given.
    :param earlier: records of other runs to compare with.
    """
    if not runs:
        raise SandmaskError("There are no runs to report. Name a folder that has records in it.")
    settings = {
        "against_paper": against_paper,
        "baseline": baseline,
        "draws": draws,
        "trials": trials,
        "metrics": metrics,
        "earlier": earlier,
    }
    given, runs = runs, _reported(runs)
    chosen = [find_rule(name) for name in rules]
    of_dataset: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        of_dataset[run.spec.dataset].append(run)
    ordered = {name: of_dataset[name] for name in dataset_order(list(of_dataset))}
    expected = {name: expected_of(some, draws, trials) for name, some in ordered.items()}
    groups = group_runs(runs)
    methods = method_order({key.method for key in groups})
    if baseline != BASELINE and not any(is_of(method, baseline) for method in methods):
        raise SandmaskError(f"No run has the baseline method {baseline!r}. {closest(baseline, list(methods))}")
    shown = shown_measures(runs, metrics)
    reports = [_rule_report(rule, ordered, groups, expected, baseline, shown) for rule in chosen]
    report = Report(len(trained(runs)), tuple(reports), given, settings)
    if earlier is not None:
        known = [name for name in shown if name in reportable(earlier)]
        then = build_report(earlier, rules, draws=draws, trials=trials, metrics=known)
        report = beside_earlier(report, then, changes_by_hand(groups, group_runs(_reported(earlier))))
    return beside_published(report) if against_paper else report


def _reported(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs that have rows in tables: averages have their own."""
    return list(judged_by_first_stage(split_averages(runs)))


def _rule_report(
    rule: SelectionRule,
    runs: Mapping[str, Sequence[RunRecord]],
    groups: Groups,
    expected: Mapping[str, Expected],
    baseline: str,
    metrics: Sequence[str],
) -> RuleReport:
    tables, notes = {}, []
    for dataset, found in runs.items():
        if rule.needs_pairs and not any(len(run.spec.test_envs) == 2 for run in found):
            notes.append(f"{dataset}: no run holds out two environments, which this rule needs.")
        elif all(rule.lacks(run) for run in found):
            notes.append(f"{dataset}: no run recorded {rule.needed}, which this rule needs: {rule.remedy}.")
        else:
            tables[dataset] = dataset_table(rule, groups, dataset, expected[dataset])
    return RuleReport(
        rule=rule.name,
        description=rule.description,
        datasets=tables,
        averages=averages_table(tables) if tables else None,
        statistics=compare(tables, baseline),
        notes=tuple(notes),
        metrics=metric_reports(metrics, tables),
        confusions=confusions(metrics, tables),
    )
