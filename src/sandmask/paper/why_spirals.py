"""Questions about Spirals: which runs find the spiral, with which draws, and what the signatures decide.

Environment 0 has no signature. A network that is accurate on its validation examples follows the spiral. The questions
use the best checkpoint of a run by training-domain validation and its last one, which compact records have, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sandmask.datasets.spirals import PUBLISHED, spiral_environment
from sandmask.paper._compare import printed_row
from sandmask.paper._printed import environments, printed
from sandmask.paper._select import alone, by_rule, trial_choices, validation
from sandmask.records import RunRecord
from sandmask.reports import Grid
from sandmask.selection import GroupKey, group_runs

SPECIAL = 0  # the environment without a signature
FOUND = 0.8  # the accuracy on its validation examples above which a network follows the spiral
_HPARAMS = (
    ("tau", "τ", ".2f"),
    ("lr", "learning rate", ".2g"),
    ("batch_size", "batch", "g"),
    ("mlp_depth", "depth", "g"),
    ("mlp_width", "width", "g"),
)


@dataclass(frozen=True)
class _Finder:
    """A run, and whether its best and its last checkpoint follow the spiral."""

    key: GroupKey
    run: RunRecord

    @property
    def at_best(self) -> bool:
        return follows_spiral(self.run, int(validation(self.run).argmax()))

    @property
    def at_last(self) -> bool:
        return follows_spiral(self.run, -1)


def follows_spiral(run: RunRecord, index: int) -> bool:
    """Whether a checkpoint classifies more than 80% of the validation examples of environment 0 correctly."""
    return bool(run.accuracy_out[index, SPECIAL] > FOUND)


def _finders(runs: Sequence[RunRecord]) -> list[_Finder]:
    return [_Finder(key, run) for key, group in group_runs(runs).items() for run in alone(group, key.test_env)]


def _of(flags: Iterable[bool]) -> str:
    values = list(flags)
    return f"{sum(values)} of {len(values)}"


def spiral_found(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """Count the runs of each method that find the spiral, keep it, and are selected."""
    every = _finders(runs)
    picks = [trial_choices(runs, by_rule(rule)) for rule in ("training-domain", "worst-training-domain")]
    rows = []
    for method in dict.fromkeys(one.key.method for one in every):
        mine = [one for one in every if one.key.method == method and one.key.test_env != SPECIAL]
        unseen = [one for one in every if (one.key.method, one.key.test_env) == (method, SPECIAL)]
        chosen = [
            [pick for key, pick in by_key.items() if key.method == method and key.test_env != SPECIAL]
            for by_key in picks
        ]
        counts = (
            _of(one.at_best for one in mine),
            _of(one.at_last for one in mine),
            *(_of(follows_spiral(pick.run, pick.index) for pick in each) for each in chosen),
            _of(one.at_best for one in unseen),
        )
        rows.append((method, *counts))
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
    """The draws that find the spiral at least once, and for how many of the held-out environments they find it."""
    draws: dict[tuple[str, int, int], list[_Finder]] = {}
    for one in _finders(runs):
        draws.setdefault((one.key.method, one.key.trial_seed, one.run.spec.hparams_seed), []).append(one)
    rows = []
    for (method, trial, draw), found in sorted(draws.items(), key=lambda item: item[0]):
        if any(one.at_best for one in found):
            hparams = found[0].run.spec.hparams
            values = tuple(format(hparams[name], form) if name in hparams else "-" for name, _, form in _HPARAMS)
            counts = (_of(one.at_best for one in found), _of(one.at_last for one in found))
            rows.append((method, str(trial), str(draw), *values, *counts))
    header = ("Algorithm", "trial", "draw", *(words for _, words, _ in _HPARAMS), "at their best", "at the last")
    note = "Of the held-out environments, 0 included. Draw 0 is the defaults, the same in every trial."
    return Grid(f"{dataset}: the draws that find it", header, tuple(rows), (note,))


def signature_alignment() -> NDArray[np.float64]:
    """For environments 1 to 16, the cosine between their signature and the sum of the other fifteen."""
    rows = []
    for environment in range(1, PUBLISHED.environments + 1):
        x, y = spiral_environment(environment)
        rows.append(x[y == 1][0, 2:].double().numpy())
    signatures = np.stack(rows)
    others = signatures.sum(axis=0) - signatures
    lengths = np.linalg.norm(signatures, axis=1) * np.linalg.norm(others, axis=1)
    return np.asarray((signatures * others).sum(axis=1) / lengths, dtype=np.float64)


def signatures(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """The last accuracy of all runs, and how far the signature of an environment agrees with the others."""
    ends: dict[tuple[str, int], list[float]] = {}
    for one in _finders(runs):
        ends.setdefault((one.key.method, one.key.test_env), []).append(100 * one.run.accuracy_in[-1, one.key.test_env])
    methods = list(dict.fromkeys(method for method, _ in ends))
    held_out = sorted({environment for _, environment in ends if environment != SPECIAL})
    cosine = signature_alignment()[[environment - 1 for environment in held_out]]
    means = {m: [float(np.mean(ends[m, e])) if (m, e) in ends else np.nan for e in held_out] for m in methods}
    rows = [
        (str(environment), f"{cosine[place]:+.2f}", *(f"{means[method][place]:.0f}" for method in methods))
        for place, environment in enumerate(held_out)
    ]
    rows.append(("rank correlation", "", *(f"{_rank_correlation(cosine, means[method]):+.2f}" for method in methods)))
    agreement = "Agreement: the cosine between an environment's signature and the sum of the other fifteen's."
    accuracy = (
        "Other columns: the mean accuracy of all runs' last checkpoints, from which the oracle chooses, on the "
        "held-out environment; 50 is chance."
    )
    header = ("held out", "agreement", *methods)
    return Grid(f"{dataset}: what signatures decide", header, tuple(rows), (agreement, accuracy))


def _rank_correlation(one: Sequence[float] | NDArray[np.float64], other: Sequence[float]) -> float:
    """Spearman's."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return float("nan")  # nothing varies, which older versions of pandas warn about
    return float(pd.Series(one).rank().corr(pd.Series(other).rank()))


def contrary(runs: Sequence[RunRecord], dataset: str) -> Grid:
    """The oracle's averages with and without the two environments with the signatures most opposed to the others."""
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
