"""`sandmask.report`: tables from files of records."""

import os
from collections.abc import Iterable, Sequence

from sandmask.records import read_runs
from sandmask.reports._data import Report
from sandmask.reports._report import build_report
from sandmask.selection import RULES

PAPER_RULES = ("training-domain", "oracle")


def report(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    selection: str | Sequence[str] | None = None,
    *,
    against_paper: bool = False,
    baseline: str = "ERM",
    draws: int | None = None,
    trials: int | None = None,
) -> Report:
    """Tables of the runs in folders of records: one for each dataset, the averages, and comparisons.

        tables = sandmask.report("runs/spirals")
        print(tables)                     # as `sandmask report` prints them
        tables.frame()                    # a row for each cell, unrounded
        tables.to_html("report.html")     # the page, with every run's curves

    :param paths: a folder of records, a .jsonl file or an archive, or several of them.
    :param selection: a selection rule or several, or "all"; "training-domain" and "oracle" by default.
    :param against_paper: put the paper's number beside ours, with the difference.
    :param baseline: the method that others are compared with.
    :param draws: hyperparameter draws of a complete cell; as many as there are if not given.
    :param trials: trials of a complete cell; as many as there are if not given.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return build_report(
        read_runs(*several),
        rule_names(selection),
        against_paper=against_paper,
        baseline=baseline,
        draws=draws,
        trials=trials,
    )


def rule_names(selection: str | Sequence[str] | None) -> list[str]:
    """The selection rules that are meant."""
    named = [selection] if isinstance(selection, str) else list(selection or PAPER_RULES)
    return list(RULES) if "all" in named else named
