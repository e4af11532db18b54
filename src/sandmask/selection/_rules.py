"""DomainBed's three selection rules, and one of ours: the worst training domain."""

from collections.abc import Sequence

import numpy as np

from sandmask.records import RunRecord
from sandmask.selection._base import RULES, Choice, SelectionRule, mean_over_environments, selection_rule


@selection_rule("training-domain", 'highest mean "out" accuracy over the training environments')
def training_domain(run: RunRecord) -> Choice:
    """The checkpoint with the highest mean "out" accuracy over training environments; of ties, the first."""
    values = mean_over_environments(run.accuracy_out[:, run.train_envs])
    index = int(values.argmax())
    return Choice(index, (float(values[index]),))


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


@selection_rule(
    "oracle", 'highest "out" accuracy of the held-out environment, last checkpoints only', uses_test_data=True
)
def oracle(run: RunRecord) -> Choice | None:
    """The last checkpoint, by the held-out environment's "out" accuracy.

    There is no early stopping, so a run that diverged has no last checkpoint to offer.
    """
    if run.status != "done":
        return None
    return Choice(len(run.steps) - 1, (float(run.accuracy_out[-1, run.spec.test_envs[0]]),))


@selection_rule("worst-training-domain", 'highest worst "out" accuracy over the training environments (ours)')
def worst_training_domain(run: RunRecord) -> Choice:
    """The checkpoint whose worst "out" accuracy over the training environments is highest.

    Ties are decided by the mean over them, then by the earlier step, between the checkpoints of a run and
    between runs. It uses no test data.
    """
    accuracy = run.accuracy_out[:, run.train_envs]
    worst, mean = accuracy.min(axis=1), mean_over_environments(accuracy)
    index = int(np.lexsort((run.steps, -mean, -worst))[0])
    return Choice(index, (float(worst[index]), float(mean[index]), -float(run.steps[index])))
