"""Questions about Spirals: which runs find the spiral, with which draws, and how signatures influence accuracy.

Environment 0 has no signature, so a network that is accurate on its validation examples follows the spiral. The answers
use only the best checkpoint of a run by training-domain validation and the last one. Compact records have both.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sandmask.datasets.spirals import PUBLISHED, spiral_environment
from sandmask.paper._compare import printed_row
from sandmask.paper._printed import environments, printed
from sandmask.paper._select import alone, by_rule, trial_choices, validation
from sandmask.records import RunRecord
from sandmask.reports import Grid
from sandmask.selection import group_runs

SPECIAL = 0  # the environment without a signature
FOUND = 0.8  # the accuracy on its validation examples above which a network follows the spiral
_HPARAMS = (
    ("tau", "τ", ".2f"),
    ("lr", "learning rate", ".2g"),
    ("batch_size", "batch", "g"),
    ("mlp_depth", "depth", "g"),
    ("mlp_width", "width", "g"),
)


def follows_spiral(run: RunRecord, index: int) -> bool:
    """Whether a checkpoint classifies more than 80% of the validation examples of environment 0 correctly."""
    return bool(run.accuracy_out[index, SPECIAL] > FOUND)


def _table(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """Return a row for each ended run: whether its best and last checkpoints follow the spiral, and its accuracy."""
    rows = [
        {
            "method": key.method,
            "held_out": key.test_env,
            "trial": key.trial_seed,
            "draw": run.spec.hparams_seed,
            "at_best": follows_spiral(run, int(validation(run).argmax())),
            "at_last": follows_spiral(run, -1),
            "accuracy": 100 * run.accuracy_in[-1, key.test_env],
            "hparams": run.spec.hparams,
        }
        for key, group in group_runs(runs).items()
        for run in alone(group, key.test_env)
    ]
    columns = ["method", "held_out", "trial", "draw", "at_best", "at_last", "accuracy", "hparams"]
    return pd.DataFrame(rows, columns=columns)


def _of(flags: Iterable[bool]) -> str:
    values = list(flags)
    return f"{sum(values)} of {len(values)}"


def spiral_found(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Count the runs of each method that find the spiral, keep it, and are selected."""
    picks = [trial_choices(runs, by_rule(rule)) for rule in ("training-domain", "worst-training-domain")]
    rows = []
    for method, mine in _table(runs).groupby("method", sort=False):
        others, unseen = mine[mine.held_out != SPECIAL], mine[mine.held_out == SPECIAL]
        chosen = [
            [pick for key, pick in by_key.items() if key.method == method and key.test_env != SPECIAL]
            for by_key in picks
        ]
        counts = (
            _of(others.at_best),
            _of(others.at_last),
            *(_of(follows_spiral(pick.run, pick.index) for pick in each) for each in chosen),
            _of(unseen.at_best),
        )
        rows.append((str(method), *counts))
    header = (
        "Algorithm",
        "runs, at their best",
        "runs, at the last",
        "chosen runs",
        "chosen by the worst environment",
        "with 0 held out",
    )
    what = (
        f"A checkpoint has found the spiral if it has over {100 * FOUND:.0f}% on the validation examples of "
        "environment 0. The last column has runs at their best with environment 0 held out; the others have the "
        "other environments."
    )
    which = (
        "At their best: the checkpoint of a run with the highest training-domain validation accuracy. Chosen: one run "
        "for each environment and trial, by training-domain and then by worst-training-domain."
    )
    return Grid(f"{dataset}: who finds the spiral", header, tuple(rows), (what, which))


def spiral_draws(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """List the draws that find the spiral at least once, and with how many held-out environments they find it."""
    rows = []
    for names, found in _table(runs).groupby(["method", "trial", "draw"]):
        if found.at_best.any():
            hparams = found.hparams.iloc[0]
            values = tuple(format(hparams[name], form) if name in hparams else "-" for name, _, form in _HPARAMS)
            rows.append((*map(str, names), *values, _of(found.at_best), _of(found.at_last)))
    header = ("Algorithm", "trial", "draw", *(words for _, words, _ in _HPARAMS), "at their best", "at the last")
    note = "Of the held-out environments, 0 included. Draw 0 is the defaults, the same in every trial."
    return Grid(f"{dataset}: the draws that find it", header, tuple(rows), (note,))


def signature_alignment() -> NDArray[np.float64]:
    """Return the cosine between the signature of each environment from 1 to 16 and the sum of the other fifteen."""
    rows = []
    for environment in range(1, PUBLISHED.environments + 1):
        x, y = spiral_environment(environment)
        rows.append(x[y == 1][0, 2:].double().numpy())
    signatures = np.stack(rows)
    others = signatures.sum(axis=0) - signatures
    lengths = np.linalg.norm(signatures, axis=1) * np.linalg.norm(others, axis=1)
    return np.asarray((signatures * others).sum(axis=1) / lengths, dtype=np.float64)


def signatures(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Compare the last accuracy of all runs with the agreement of an environment's signature with the others."""
    table = _table(runs)
    methods = list(dict.fromkeys(table.method))
    others = table[table.held_out != SPECIAL]
    means = others.groupby(["held_out", "method"]).accuracy.mean().unstack().reindex(columns=methods)
    cosine = signature_alignment()[[int(environment) - 1 for environment in means.index]]
    rows = [
        (str(environment), f"{agreement:+.2f}", *(f"{mean:.0f}" for mean in means.loc[environment]))
        for environment, agreement in zip(means.index, cosine, strict=True)
    ]
    correlations = (_rank_correlation(cosine, means[method].tolist()) for method in methods)
    rows.append(("rank correlation", "", *(f"{correlation:+.2f}" for correlation in correlations)))
    alignment = "Agreement: the cosine between an environment's signature and the sum of the other fifteen's."
    accuracy = (
        "Other columns: the mean accuracy of all runs' last checkpoints, from which the oracle chooses, on the "
        "held-out environment; 50 is chance."
    )
    header = ("held out", "agreement", *methods)
    return Grid(f"{dataset}: what signatures decide", header, tuple(rows), (alignment, accuracy))


def _rank_correlation(one: Sequence[float] | NDArray[np.float64], other: Sequence[float]) -> float:
    """Compute Spearman's rank correlation."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return float("nan")  # nothing varies, which older versions of pandas warn about
    return float(pd.Series(one).rank().corr(pd.Series(other).rank()))


def contrary(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Compute the oracle's averages with and without the two environments whose signatures most oppose the others."""
    names = environments(dataset)
    low = sorted(1 + int(place) for place in np.argsort(signature_alignment()[: len(names) - 1])[:2])
    kept = [place for place in range(len(names)) if place not in low]
    picks = trial_choices(runs, by_rule("oracle"))
    rows = []
    for method in dict.fromkeys(key.method for key in picks):
        ours = [(key.test_env, 100 * pick.test_accuracy) for key, pick in picks.items() if key.method == method]
        paper = [printed("oracle", dataset, printed_row(method), name) for name in names]
        row = [method]
        for places in (range(len(names)), low, kept):
            mine = [value for environment, value in ours if environment in places]
            here = {environment for environment, _ in ours if environment in places}
            cells = [cell.mean for place, cell in enumerate(paper) if cell is not None and place in here]
            row.append(f"{np.mean(mine):.1f} [{np.mean(cells):.1f}]" if cells and mine else "-")
        rows.append(tuple(row))
    without = " and ".join(map(str, low))
    header = ("Algorithm", "all", f"environments {without}", "the others")
    note = "In brackets the mean of the paper's printed environments."
    return Grid(f"{dataset}: the oracle, and environments {without}", header, tuple(rows), (note,))
