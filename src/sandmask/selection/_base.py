"""Selection rules and their registry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sandmask.records import RunRecord
from sandmask.registry import Registry


@dataclass(frozen=True)
class Choice:
    """A checkpoint of a run, by its index, and its value.

    Larger is better; where first entries tie, the next ones decide. The first is the one that tables report.
    """

    index: int
    value: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Selected:
    """A run and its checkpoint, as a rule chose them."""

    run: RunRecord
    index: int
    value: tuple[float, ...]
    test_env: int

    @property
    def step(self) -> int:
        """The training step of the checkpoint."""
        return int(self.run.steps[self.index])

    @property
    def validation(self) -> float:
        """The value that the rule maximized, in 0..1."""
        return self.value[0]

    @property
    def test_accuracy(self) -> float:
        """The number that tables report: the held-out environment's "in" accuracy, in 0..1."""
        return float(self.run.accuracy_in[self.index, self.test_env])


ChooseAlone = Callable[[RunRecord], Choice | None]
Choose = Callable[[RunRecord, Sequence[RunRecord]], Choice | None]


@dataclass(frozen=True)
class SelectionRule:
    """A way to choose a checkpoint and a run of a sweep.

    `choose` is given a run that holds out one environment, and the runs of the same hyperparameters that hold
    out a second one too (few rules need them); it answers with a checkpoint, or None for a run that it cannot
    judge. Between runs the largest value wins. `needs_metrics` are curves without which it cannot judge a run, and
    `remedy` says how they are recorded.
    """

    name: str
    description: str
    choose: Choose
    uses_test_data: bool = False
    needs_pairs: bool = False
    needs_metrics: tuple[str, ...] = ()
    remedy: str = "train with --diagnostics"

    def lacks(self, run: RunRecord) -> bool:
        """Whether a run did not record what the rule judges by."""
        return not run.metrics.keys() >= set(self.needs_metrics)


RULES: Registry[SelectionRule] = Registry("selection rule")


def selection_rule(
    name: str, description: str, *, uses_test_data: bool = False, needs_metrics: tuple[str, ...] = ()
) -> Callable[[ChooseAlone], ChooseAlone]:
    """Register a function of one run's records as a selection rule.

        @selection_rule("best-training", "highest mean accuracy on the training environments' own data")
        def best_training(run: RunRecord) -> Choice:
            values = run.accuracy_in[:, run.train_envs].mean(axis=1)
            return Choice(int(values.argmax()), (float(values.max()),))

    :param name: name of the rule.
    :param description: what it maximizes, for lists and tables.
    :param uses_test_data: whether it looks at the held-out environment.
    :param needs_metrics: metrics without which a run is not judged.
    :return: a decorator.
    """

    def register(function: ChooseAlone) -> ChooseAlone:
        def choose(run: RunRecord, pairs: Sequence[RunRecord]) -> Choice | None:  # noqa: ARG001
            return None if rule.lacks(run) else function(run)

        rule = SelectionRule(name, description, choose, uses_test_data, needs_metrics=needs_metrics)
        RULES.register(rule)
        return function

    return register


def mean_over_environments(accuracy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each row, summed in the order in which the mean of a list is summed.

    Ties decide tables, and they are ties of rounded sums, which depend on the order.

    :param accuracy: accuracies `[T, environments]`.
    """
    mean: NDArray[np.float64] = np.ascontiguousarray(accuracy).mean(axis=1)
    return mean
