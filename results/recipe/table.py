"""The table of the confirming runs, in Markdown: `python results/recipe/table.py`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sandmask.records import RunRecord, read_runs
from sandmask.selection import RULES, select

HERE = Path(__file__).parent
DATA = {"fresh data, seed 1": "spirals-seed-1", "fresh data, seed 2": "spirals-seed-2", "published data": "spirals"}
METHODS = {
    "ERM": "ERM",
    "IRM": "IRM",
    "AND-mask": "ANDMask",
    "AND-mask, rescaled": "ANDMask-rescaled",
    "SAND-mask": "SANDMask",
    "SAND-mask, rescaled": "SANDMask-rescaled",
    "SAND-mask, released": "SANDMask-released",
    "Geometric mean": "GeometricMean",
}


def accuracies(runs: Sequence[RunRecord], rule: str) -> np.ndarray:
    """Accuracy in percent for every trial and held-out environment, [trials, 16]."""
    trials = sorted({run.spec.trial_seed for run in runs})
    rows = []
    for trial in trials:
        mine = [[run for run in runs if run.spec.trial_seed == trial and run.spec.test_envs == (e,)] for e in range(16)]
        rows.append([select(RULES[rule], some, e).test_accuracy for e, some in enumerate(mine)])  # type: ignore[union-attr]
    return 100.0 * np.array(rows)


def cell(runs: Sequence[RunRecord], rule: str) -> str:
    """`99.9 ± 0.0`: the mean over environments and trials, and its standard error over trials where there are three."""
    means = accuracies(runs, rule).mean(axis=1)
    error = f" ± {means.std() / np.sqrt(len(means)):.1f}" if len(means) > 1 else "*"
    return f"{means.mean():.1f}{error}"


def table(rule: str) -> str:
    """One row a method, one column a dataset."""
    found = {name: read_runs(HERE / f"{file}.records.parquet") for name, file in DATA.items()}
    lines = [f"| | {' | '.join(DATA)} |", "|---" * (len(DATA) + 1) + "|"]
    for title, algorithm in METHODS.items():
        cells = [cell([run for run in runs if run.spec.algorithm == algorithm], rule) for runs in found.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for name in ("training-domain", "worst-training-domain", "oracle"):
        print(f"{name}\n\n{table(name)}\n")
