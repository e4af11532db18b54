"""DomainBed's three selection rules, and one of ours: the worst training domain."""

from collections.abc import Sequence

import numpy as np

from sandmask.records import RunRecord
from sandmask.selection._base import RULES, Choice, SelectionRule, mean_over_environments, selection_rule


@selection_rule("training-domain", 'highest mean "out" accuracy over the training environments')
def training_domain(run: RunRecord) -> Choice:
    """Select the checkpoint with the highest mean "out" accuracy over training environments; the first of ties.

    :param run: record of a run.
    """
    values = mean_over_environments(run.accuracy_out[:, run.train_envs])
    index = int(values.argmax())
    return Choice(index, (float(values[index]),))


def leave_one_domain_out(run: RunRecord, pairs: Sequence[RunRecord]) -> Choice | None:
    """Select the step at which sibling runs do best on the environment that only they hold out.

    Every training environment of `run` needs one sibling that also holds it out. The value of a step is the mean of
    the siblings' "in" accuracies there. Only steps that all of them reached are candidates; the earliest of ties is
    selected.

    :param run: record of a run that holds out one environment.
    :param pairs: runs with the same hyperparameters that hold out a second one.
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


@selection_rule(
    "oracle", 'highest "out" accuracy of the held-out environment, last checkpoints only', uses_test_data=True
)
def oracle(run: RunRecord) -> Choice | None:
    """Select the last checkpoint, judged by the held-out environment's "out" accuracy.

    A run that diverged has no last checkpoint.

    :param run: record of a run.
    """
    if run.status != "done":
        return None
    return Choice(len(run.steps) - 1, (float(run.accuracy_out[-1, run.spec.test_envs[0]]),))


@selection_rule("worst-training-domain", 'highest worst "out" accuracy over the training environments (ours)')
def worst_training_domain(run: RunRecord) -> Choice:
    """Select the checkpoint whose lowest "out" accuracy over the training environments is highest.

    Ties are decided by the mean, then by the earlier step, within a run and between runs. The rule uses no test data.

    :param run: record of a run.
    """
    accuracy = run.accuracy_out[:, run.train_envs]
    worst, mean = accuracy.min(axis=1), mean_over_environments(accuracy)
    index = int(np.lexsort((run.steps, -mean, -worst))[0])
    return Choice(index, (float(worst[index]), float(mean[index]), -float(run.steps[index])))
