"""The rules of accuracy, by another recorded metric: `training-domain by f1`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sandmask.errors import SandmaskError
from sandmask.records import MEASURES, Measure, RunRecord, measured
from sandmask.registry import closest
from sandmask.selection._base import RULES, Choice, SelectionRule

ACCURACY = "accuracy"
_BY = " by "


def by_metric(rule: SelectionRule, metric: str) -> SelectionRule:
    """A rule that takes the values of a metric for accuracies; of one where lower is better, one minus the values.

    :param rule: a rule that judges runs by accuracies.
    :param metric: "accuracy", which gives the rule itself, or a metric of `MEASURES` that is a number.
    """
    if metric == ACCURACY:
        return rule
    numbers = [name for name in MEASURES if not MEASURES[name].is_table]
    if metric not in MEASURES or MEASURES[metric].is_table:
        raise SandmaskError(f"Runs cannot be selected by {metric!r}. {closest(metric, [ACCURACY, *numbers])}")
    if rule.needs_metrics:
        raise SandmaskError(f"The rule {rule.name} does not select by accuracy, so it cannot select by {metric}.")
    measure = MEASURES[metric]

    def choose(run: RunRecord, pairs: Sequence[RunRecord]) -> Choice | None:
        seen = _seen_by(run, measure)
        others = [_seen_by(pair, measure) for pair in pairs]
        if seen is None or None in others:
            return None
        return rule.choose(seen, [other for other in others if other is not None])

    return replace(
        rule,
        name=f"{rule.name}{_BY}{measure.name}",
        description=f"{rule.description}, with {measure.name} in place of accuracy",
        choose=choose,
        needs_metrics=(f"{measure.name}/out/0",),
        remedy=f"train with --metrics {measure.name}",
    )


def find_rule(name: str) -> SelectionRule:
    """Return a registered rule, or one with a metric in its name.

    :param name: name such as "training-domain" or "training-domain by f1".
    """
    rule, by, metric = name.partition(_BY)
    return by_metric(RULES[rule], metric) if by else RULES[rule]


def _seen_by(run: RunRecord, measure: Measure) -> RunRecord | None:
    """A run whose accuracies are the values of a metric; None where it did not record them."""
    inside, outside = (_values(run, measure, split) for split in ("in", "out"))
    return None if inside is None or outside is None else replace(run, accuracy_in=inside, accuracy_out=outside)


def _values(run: RunRecord, measure: Measure, split: str) -> NDArray[np.float64] | None:
    values = measured(run, measure.name, split)
    if values is None:
        return None
    known = np.where(np.isnan(values), -1.0, values)  # never the best
    return np.where(np.isnan(values), -1.0, 1.0 - known) if measure.lower_is_better else known
