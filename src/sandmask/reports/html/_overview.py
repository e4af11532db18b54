"""What was run: the numbers that a reader wants first."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from sandmask.records import RunRecord
from sandmask.selection import method_names

_SETTINGS = ("steps", "checkpoint_every", "network", "precision", "space")


def overview(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Counts of all runs, and for each dataset what its runs have in common and in what they differ."""
    of_dataset: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        of_dataset[run.spec.dataset].append(run)
    return {
        "runs": len(runs),
        "status": dict(Counter(run.status for run in runs)),
        "datasets": {name: _dataset(found) for name, found in of_dataset.items()},
    }


def _dataset(runs: Sequence[RunRecord]) -> dict[str, Any]:
    methods = method_names(runs)
    settings = {name: sorted({getattr(run.spec, name) for run in runs}) for name in _SETTINGS}
    return {
        "environments": list(runs[0].env_names),
        "runs": len(runs),
        "methods": len(set(methods.values())),
        "trials": len({run.spec.trial_seed for run in runs}),
        "draws": len({run.spec.hparams_seed for run in runs}),
        "pairs": any(len(run.spec.test_envs) > 1 for run in runs),
        **settings,
    }
