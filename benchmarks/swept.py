"""Whether the runs of a GPU's sweep are what the slow path gives: their first steps again, alone, on a CPU, in float32.

Of each method the draws of least work are taken, with all their held-out environments. Rounding makes single runs drift
apart, so the test is that of `fast_path`, paired by run, at all checkpoints that the records have.

python -m benchmarks.swept [RECORDS [FILE]]     # FILE keeps the slow runs' records for another time
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks._measure import print_rows
from benchmarks.fast_path import Curves, p_value, slow_runs
from sandmask.datasets import load_dataset
from sandmask.records import RunRecord, read_runs
from sandmask.reports.statistics import paired_comparison
from sandmask.sweeps._work import work_of

RECORDS = "results/paper/spirals.records.parquet"
DRAWS, STEPS, EVERY = 3, 1001, 50


def lightest(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """All runs of the draws of least work; the default one, which is shared by the trials, is not among them."""
    by_draw: defaultdict[tuple[int, int], list[RunRecord]] = defaultdict(list)
    for run in runs:
        by_draw[run.spec.trial_seed, run.spec.hparams_seed].append(run)
    dataset = load_dataset("Spirals")
    drawn = (group for (_, draw), group in by_draw.items() if draw)
    draws = sorted(drawn, key=lambda group: work_of(group[0].spec, dataset).step)
    return [run for group in draws[:DRAWS] for run in group]


def curves(runs: Iterable[RunRecord]) -> dict[str, Curves]:
    """Accuracies of the steps that all have, where runs were trained and where they were not."""
    steps = range(0, STEPS, EVERY)
    kept = [(run, np.searchsorted(run.steps, steps)) for run in runs]
    return {
        "trained on": np.stack([run.accuracy_out[rows][:, run.train_envs].mean(1) for run, rows in kept]),
        "held out": np.stack([run.accuracy_in[rows, run.spec.test_envs[0]] for run, rows in kept]),
    }


def pairs(records: str, kept: Path | None) -> dict[str, list[tuple[RunRecord, RunRecord]]]:
    """Of each method the slow runs, and the same ones as they were swept."""
    by_method: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in read_runs(records):
        by_method[run.spec.algorithm].append(run)
    chosen = [run for runs in by_method.values() for run in lightest(runs)]
    alone = {run.spec.id: replace(run.spec, steps=STEPS, precision="fp32") for run in chosen}
    slow = {run.spec.id: run for run in slow_runs(list(alone.values()), kept)}
    found: defaultdict[str, list[tuple[RunRecord, RunRecord]]] = defaultdict(list)
    for run in chosen:
        found[run.spec.algorithm].append((slow[alone[run.spec.id].id], run))
    return found


def averages(gaps: Mapping[tuple[str, int], Sequence[float]]) -> list[tuple[str, ...]]:
    """How much higher swept runs are, all methods together: of (where, environment held out) the runs' differences."""
    rows: list[tuple[str, ...]] = [("where", "environments", "difference", "p")]
    for where in dict.fromkeys(where for where, _ in gaps):
        means = [100 * float(np.mean(values)) for (place, _), values in gaps.items() if place == where]
        difference = f"{np.mean(means):+.2f} ± {np.std(means, ddof=1) / len(means) ** 0.5:.2f}"
        p = paired_comparison(means, [0.0] * len(means)).p_value
        rows.append((where, str(len(means)), difference, f"{p:.3f}"))
    return rows


def main() -> None:
    records, *kept = sys.argv[1:] or [RECORDS]
    rows: list[tuple[str, ...]] = [("method", "precision", "runs", "where", "slow", "swept", "largest difference", "p")]
    gaps: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for method, runs in pairs(records, Path(kept[0]) if kept else None).items():
        slow, swept = zip(*runs, strict=True)
        for (where, one), other in zip(curves(slow).items(), curves(swept).values(), strict=True):
            largest, p = p_value(one, other)
            means = (f"{100 * each.mean():.2f}" for each in (one, other))
            numbers = (*means, f"{100 * largest:.2f}", f"{p:.3f}")
            rows.append((method, swept[0].spec.precision, str(len(swept)), where, *numbers))
            for run, gap in zip(swept, (other - one).mean(1), strict=True):
                gaps[where, run.spec.test_envs[0]].append(float(gap))
    print_rows(f"Spirals, the first {STEPS} steps of {DRAWS} draws: accuracy in %, mean over checkpoints", rows)
    print_rows("All methods: swept minus slow, of each environment held out the mean over its runs", averages(gaps))


if __name__ == "__main__":
    main()
