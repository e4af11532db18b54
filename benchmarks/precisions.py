"""Compare the same runs in two precisions: the difference of their accuracies in percent, second minus first.

python -m benchmarks.precisions RECORDS[,RECORDS...] RECORDS[,RECORDS...]
python -m benchmarks.precisions RECORDS RECORDS until=1000     # the checkpoints up to step 1,000 only

A pair is a draw of a method: the mean over held-out environments, at the last checkpoint and over all checkpoints that
both runs have. Runs of one draw have the same hyperparameters, so they are not counted as independent. The p-value is
that of a sign-flip test over these pairs.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks._measure import print_rows
from sandmask._text import counted
from sandmask.records import RunRecord, read_runs
from sandmask.reports.statistics import paired_comparison

Key = tuple[str, str, tuple[int, ...], int, int]  # dataset, method, held-out environments, trial, draw
Differences = dict[str, list[float]]  # by measure: one per held-out environment, in percent
MEASURES = ("held out, last checkpoint", "held out, mean over checkpoints", "trained on, mean over checkpoints")


def by_key(files: str) -> dict[Key, RunRecord]:
    """The finished runs of several archives."""
    runs = (run for file in files.split(",") for run in read_runs(file))
    return {
        (s.dataset, s.algorithm, tuple(s.test_envs), s.trial_seed, s.hparams_seed): run
        for run in runs
        if run.status == "done" and (s := run.spec)
    }


def until(runs: dict[Key, RunRecord], last: int) -> dict[Key, RunRecord]:
    """The runs without the checkpoints after this step."""
    return {key: run.at(run.steps <= last) for key, run in runs.items()}


def differences(one: RunRecord, other: RunRecord) -> dict[str, float]:
    """The second run minus the first, in percent."""
    _, rows, others = np.intersect1d(one.steps, other.steps, return_indices=True)
    held_out = 100 * (other.accuracy_in[others] - one.accuracy_in[rows])[:, list(one.spec.test_envs)].mean(1)
    trained = 100 * (other.accuracy_out[others] - one.accuracy_out[rows])[:, list(one.train_envs)].mean(1)
    return dict(zip(MEASURES, (held_out[-1], held_out.mean(), trained.mean()), strict=True))


def row(name: str, draws: Iterable[Differences], runs: int) -> tuple[str, ...]:
    """One line of the table: each measure's mean, 95% interval and p-value over draws."""
    units = list(draws)
    cells = []
    for measure in MEASURES:
        values = [float(np.mean(unit[measure])) for unit in units]
        found = paired_comparison(values, [0.0] * len(values))
        interval = "" if found.interval is None else f" ({found.interval[0]:+.2f} to {found.interval[1]:+.2f})"
        cells.append(f"{found.difference:+.2f}{interval}, p = {found.p_value:.3f}")
    return (name, str(len(units)), str(runs), *cells)


def compared(one: dict[Key, RunRecord], other: dict[Key, RunRecord]) -> list[tuple[str, ...]]:
    """All methods together, then each."""
    draws: defaultdict[tuple[str, str, int, int], Differences] = defaultdict(lambda: defaultdict(list))
    for key in sorted(one.keys() & other.keys()):
        dataset, method, _, trial, draw = key
        for measure, value in differences(one[key], other[key]).items():
            draws[dataset, method, trial, draw][measure].append(value)
    if not draws:
        raise SystemExit("The archives have no run in common: same dataset, method, environment, trial and draw.")
    rows: list[tuple[str, ...]] = [("method", "draws", "runs", *MEASURES)]
    by_method: defaultdict[str, list[Differences]] = defaultdict(list)
    for (_, method, _, _), unit in draws.items():
        by_method[method].append(unit)
    for name, units in {"all": list(draws.values()), **by_method}.items():
        rows.append(row(name, units, sum(len(unit[MEASURES[0]]) for unit in units)))
    return rows


def main(words: Sequence[str]) -> None:
    files = [word for word in words if not word.startswith("until=")]
    if len(files) != 2:
        raise SystemExit(__doc__)
    one, other = map(by_key, files)
    for last in (int(word.removeprefix("until=")) for word in words if word not in files):
        one, other = until(one, last), until(other, last)
    names = [" and ".join(sorted({run.spec.precision for run in runs.values()})) for runs in (one, other)]
    rows = compared(one, other)
    print_rows(f"{names[1]} minus {names[0]}: {counted(int(rows[1][2]), 'pair')} of runs", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
