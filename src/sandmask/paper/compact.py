"""Make records small enough to be kept with the code, without changing a table.

Each run keeps the checkpoints of every N steps, and all that a rule may select: under training-domain validation the
first, last, luckiest and unluckiest of the checkpoints that tie; those of worst-training-domain and
leave-one-domain-out (in the runs that it compares, too); and the last one, for the oracle. A rule selects the same
checkpoint from them as from all, so tables stay equal. So do the answers of `why` to intervals that N divides.
"""

from collections.abc import Sequence

import numpy as np

from sandmask.paper._select import every, thinned
from sandmask.paper.why import tied
from sandmask.records import RunRecord
from sandmask.selection import RULES, group_runs, is_settled, siblings

EVERY = 50


def compact(runs: Sequence[RunRecord], interval: int = EVERY) -> list[RunRecord]:
    """The same runs with fewer checkpoints; unfinished runs keep all of theirs."""
    pairs = _steps_of_pairs(runs)
    return [_compacted(run, interval, pairs.get(run.spec.id, set())) if is_settled(run) else run for run in runs]


def _compacted(run: RunRecord, interval: int, steps: set[int]) -> RunRecord:
    if not len(run.steps):
        return run
    kept = {*every(run, interval).tolist(), *np.flatnonzero(np.isin(run.steps, list(steps))).tolist()}
    if run.train_envs:
        best = tied(run)
        kept |= {int(best[0]), int(best[-1])}
        for test_env in run.spec.test_envs:
            accuracy = run.accuracy_in[best, test_env]
            kept |= {int(best[accuracy.argmin()]), int(best[accuracy.argmax()])}
        worst = RULES["worst-training-domain"].choose(run, ())
        kept |= {worst.index} if worst is not None else set()
    return thinned(run, sorted(kept))


def _steps_of_pairs(runs: Sequence[RunRecord]) -> dict[str, set[int]]:
    """For each run, by its id, the steps that leave-one-domain-out chooses, in the run itself and in its siblings."""
    rule = RULES["leave-one-domain-out"]
    found: dict[str, set[int]] = {}
    for group in group_runs(runs).values():
        settled = [run for run in group if is_settled(run) and len(run.steps)]
        if not any(len(run.spec.test_envs) == 2 for run in settled):
            continue
        for run in settled:
            if len(run.spec.test_envs) != 1:
                continue
            others = siblings(run, settled)
            choice = rule.choose(run, others)
            if choice is not None:
                for each in (run, *others):
                    found.setdefault(each.spec.id, set()).add(int(run.steps[choice.index]))
    return found
