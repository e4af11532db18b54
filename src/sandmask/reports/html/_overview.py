"""What was run: the numbers that a reader wants first."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from sandmask.records import RunRecord

_SETTINGS = ("steps", "network", "precision", "space")


def overview(runs: Sequence[RunRecord], methods: Sequence[str]) -> dict[str, Any]:
    """Counts of all runs, and for each dataset what its runs have in common and in what they differ.

    `methods` are the runs' methods, one each.
    """
    of_dataset: defaultdict[str, list[tuple[RunRecord, str]]] = defaultdict(list)
    for run, method in zip(runs, methods, strict=True):
        of_dataset[run.spec.dataset].append((run, method))
    return {
        "runs": len(runs),
        "methods": len(set(methods)),
        "status": dict(Counter(run.status for run in runs)),
        "datasets": {name: _dataset(found) for name, found in of_dataset.items()},
    }


def _dataset(found: Sequence[tuple[RunRecord, str]]) -> dict[str, Any]:
    specs = [run.spec for run, _ in found]
    return {
        "environments": list(found[0][0].env_names),
        "runs": len(found),
        "methods": len({method for _, method in found}),
        "trials": len({spec.trial_seed for spec in specs}),
        "draws": len({spec.hparams_seed for spec in specs}),
        **{name: sorted({getattr(spec, name) for spec in specs}) for name in _SETTINGS},
    }
