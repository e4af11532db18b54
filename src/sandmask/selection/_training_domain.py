"""Training-domain validation: the rule of the paper's Table 1."""

from sandmask.records import RunRecord
from sandmask.selection._base import Choice, mean_over_environments, selection_rule


@selection_rule("training-domain", 'highest mean "out" accuracy over the training environments')
def training_domain(run: RunRecord) -> Choice:
    """The checkpoint with the highest mean "out" accuracy over training environments; of ties, the first."""
    values = mean_over_environments(run.accuracy_out[:, run.train_envs])
    index = int(values.argmax())
    return Choice(index, (float(values[index]),))
