"""Statistics over a rule's tables: paired comparisons with the baseline, and mean ranks."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sandmask.reports._data import Comparison, Statistics
from sandmask.reports._tables import Trials, is_of, method_order
from sandmask.reports.statistics import critical_difference, mean_ranks, paired_comparison
from sandmask.selection import is_soup

ALL = "all"
_Condition = tuple[str, str, int]  # dataset, environment, trial
_Scores = dict[str, dict[_Condition, float]]  # of each method


def compare(trials: Mapping[str, Trials], baseline: str) -> Statistics | None:
    """Compare every method with the baseline on each dataset, and on all together when there are several.

    None when there is nothing to compare: no baseline among the methods, or no other method.
    """
    scores = _scores(trials)
    methods = method_order(list(scores))
    reference = next((name for name in methods if is_of(name, baseline)), None)
    if reference is None or len(methods) < 2:
        return None
    scopes = {dataset: [dataset] for dataset in trials}
    if len(trials) > 1:
        scopes[ALL if ALL not in trials else f"{ALL} datasets"] = list(trials)
    comparisons: list[Comparison] = []
    critical = {}
    for scope, datasets in scopes.items():
        within = {
            method: {key: value for key, value in found.items() if key[0] in datasets}
            for method, found in scores.items()
        }
        present = [method for method in methods if within[method]]
        ranks, conditions = _ranks(present, within, reference)
        if len(ranks) > 1 and conditions > 1:
            critical[scope] = critical_difference(len(ranks), conditions)
        for method in present:
            pairs = sorted(within[method].keys() & within[reference].keys())
            against = None
            if method != reference and pairs:
                against = paired_comparison(
                    [within[method][key] for key in pairs], [within[reference][key] for key in pairs]
                )
            comparisons.append(Comparison(scope, method, ranks.get(method), against))
    return Statistics(reference, tuple(comparisons), critical)


def _scores(trials: Mapping[str, Trials]) -> _Scores:
    """Accuracies in percent, of the conditions in which a rule found something to choose, and that is a number."""
    scores: _Scores = {}
    for dataset, tables in trials.items():
        for (method, environment), found in tables.items():
            of_method = scores.setdefault(method, {})
            for trial in found:
                if trial.selected is not None and math.isfinite(trial.selected.test_accuracy):
                    key = (dataset, environment, trial.trial_seed)
                    of_method[key] = 100 * trial.selected.test_accuracy
    return scores


def _ranks(methods: Sequence[str], scores: _Scores, reference: str) -> tuple[dict[str, float], int]:
    """Mean ranks over the baseline's cells (means over trials), of the methods that have them all.

    Also how many cells those are. Soups have no rank: they are of many runs, and would change the ranks of the others.
    """
    means = {method: _cell_means(scores[method]) for method in methods}
    cells = sorted(means.get(reference, {}))
    ranked = [name for name in methods if cells and means[name].keys() >= set(cells) and not is_soup(name)]
    if len(ranked) < 2:
        return {}, 0
    table = np.array([[means[method][cell] for method in ranked] for cell in cells])
    return dict(zip(ranked, mean_ranks(table).tolist(), strict=True)), len(cells)


def _cell_means(scores: Mapping[_Condition, float]) -> dict[tuple[str, str], float]:
    cells: dict[tuple[str, str], list[float]] = {}
    for (dataset, environment, _), value in sorted(scores.items()):
        cells.setdefault((dataset, environment), []).append(value)
    return {cell: float(np.mean(values)) for cell, values in cells.items()}
