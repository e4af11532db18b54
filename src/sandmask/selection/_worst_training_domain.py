"""Worst training domain: a rule of ours, beside the paper's and never in their place."""

import numpy as np

from sandmask.records import RunRecord
from sandmask.selection._base import Choice, mean_over_environments, selection_rule


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
