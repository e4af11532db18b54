"""Leave-one-domain-out cross-validation."""

from collections.abc import Sequence

import numpy as np

from sandmask.records import RunRecord
from sandmask.selection._base import RULES, Choice, SelectionRule, mean_over_environments


def leave_one_domain_out(run: RunRecord, pairs: Sequence[RunRecord]) -> Choice | None:
    """The step at which the sibling runs do best on the environment that only they hold out.

    For every training environment of `run` there has to be one sibling (same hyperparameters) that holds it
    out as well; its accuracy there, on the "in" split, counts. The value of a step is the mean over siblings,
    and only steps that all of them reached are candidates; the earliest of ties is taken.
    """
    siblings = []
    for environment in run.train_envs:
        both = {run.spec.test_envs[0], environment}
        found = [pair for pair in pairs if set(pair.spec.test_envs) == both]
        if len(found) != 1:
            return None
        siblings.append((environment, found[0]))
    common = run.steps
    for _, sibling in siblings:
        common = np.intersect1d(common, sibling.steps, assume_unique=True)
    if not len(common):
        return None
    columns = [
        sibling.accuracy_in[np.searchsorted(sibling.steps, common), environment] for environment, sibling in siblings
    ]
    values = mean_over_environments(np.stack(columns, axis=1))
    best = int(values.argmax())
    return Choice(int(np.searchsorted(run.steps, common[best])), (float(values[best]),))


RULES.register(
    SelectionRule(
        "leave-one-domain-out",
        "highest mean accuracy on a second held-out environment, in runs that hold out two",
        leave_one_domain_out,
        needs_pairs=True,
    )
)
