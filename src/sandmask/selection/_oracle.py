"""Test-domain validation: the rule of the paper's Table 2."""

from sandmask.records import RunRecord
from sandmask.selection._base import Choice, selection_rule


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
