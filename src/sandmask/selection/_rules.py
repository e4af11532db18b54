"""Selection rules: the registry, DomainBed's three rules, two of our own, and rules that use other metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sandmask.errors import SandmaskError
from sandmask.records import MEASURES, Measure, RunRecord, measured
from sandmask.registry import Registry, closest


@dataclass(frozen=True)
class Choice:
    """The index of a run's checkpoint, and its value.

    Larger values are better. If the first numbers are equal, the next ones decide. Reports show the first number.
    """

    index: int
    value: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Selected:
    """The run and the checkpoint that a rule selected."""

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
        """The (first) value that the rule maximized, in 0..1 for the built-in rules."""
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

    `choose` takes a run that holds out one environment, and (if `needs_pairs`) the runs with the same hyperparameters
    that also hold out a second one. It returns a checkpoint, or None if it cannot judge the run. The run with the
    largest value is selected. `needs_metrics` are metrics that the rule needs; `remedy` says how to record them.
    """

    name: str
    description: str
    choose: Choose
    uses_test_data: bool = False
    needs_pairs: bool = False
    needs_metrics: tuple[str, ...] = ()
    remedy: str = "train with --diagnostics"

    @property
    def needed(self) -> str:
        """The metrics that the rule needs, as users name them: "f1" for "f1/out/0"."""
        return " and ".join(dict.fromkeys(name.partition("/")[0] for name in self.needs_metrics))

    def lacks(self, run: RunRecord) -> bool:
        """Whether a run did not record the metrics that the rule needs."""
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
    :param description: what the rule maximizes, for lists and tables.
    :param uses_test_data: whether the rule uses data of the held-out environment.
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
    """Return the mean of each row, summed in the same order as the mean of a list.

    The order changes the rounding, and with it ties, which decide tables.

    :param accuracy: accuracies `[T, environments]`.
    """
    mean: NDArray[np.float64] = np.ascontiguousarray(accuracy).mean(axis=1)
    return mean


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

    A run that diverged or was pruned has no last checkpoint.

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


COHERENCE, LOSS = "held_out_coherence", "held_out_loss"


def signal_threshold(environments: int) -> float:
    """Return the coherence |mean_e g_e|^2 / mean_e |g_e|^2 at which signal and noise are equally large.

    Let g_e = s + n_e, with a part s that all E environments share and independent parts n_e of power v. The mean
    gradient has a signal of power |s|^2 and a noise of power v / E, and the coherence is (|s|^2 + v / E) / (|s|^2 +
    v): 1/E if nothing is shared, and 2 / (E + 1) if |s|^2 = v / E.

    :param environments: number of environments E.
    """
    return 2 / (environments + 1)


def has_common_signal(run: RunRecord) -> NDArray[np.bool_]:
    """Return at which checkpoints the mean gradient on held-out examples is more signal than noise.

    A checkpoint is judged by the median of its coherence and its two neighbours'. The first and the last are judged by
    their own value.

    :param run: record of a run with diagnostics.
    :return: booleans `[T]`.
    """
    padded = np.pad(run.metrics[COHERENCE], 1, mode="edge")
    median = np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)
    above: NDArray[np.bool_] = median >= signal_threshold(len(run.train_envs))
    return above


@selection_rule(
    "common-signal",
    'highest likelihood of the "out" examples while the training environments\' gradients have a common signal (ours)',
    needs_metrics=(COHERENCE, LOSS),
)
def common_signal(run: RunRecord) -> Choice | None:
    """Select the most likely checkpoint at which the training environments' gradients have a common signal.

    Only checkpoints with a common signal (`has_common_signal`) are candidates. Among them, and between runs, the value
    is exp(-loss): the geometric mean of the probabilities that the model gives to the right labels of the training
    environments' "out" examples. The first of ties is selected. A run that was trained without --diagnostics, or
    without any such checkpoint, is not judged. The rule uses no test data.

    :param run: record of a run.
    """
    likelihood = np.exp(-run.metrics[LOSS])
    candidates = has_common_signal(run) & np.isfinite(likelihood)
    if not candidates.any():
        return None
    index = int(np.where(candidates, likelihood, -1.0).argmax())
    return Choice(index, (float(likelihood[index]),))


ACCURACY = "accuracy"
_BY = " by "


def by_metric(rule: SelectionRule, metric: str) -> SelectionRule:
    """Return a rule that uses a metric instead of accuracy, or one minus the metric if lower is better.

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
        seen = [_seen_by(each, measure) for each in (run, *pairs)]
        known = [each for each in seen if each is not None]
        return rule.choose(known[0], known[1:]) if len(known) == len(seen) else None

    return replace(
        rule,
        name=f"{rule.name}{_BY}{measure.name}",
        description=f"{rule.description}, with {measure.name} instead of accuracy",
        choose=choose,
        needs_metrics=(f"{measure.name}/out/0",),
        remedy=f"train with --metrics {measure.name}",
    )


def find_rule(name: str) -> SelectionRule:
    """Return a registered rule, or one with a metric in its name: "training-domain by f1".

    :param name: name of the rule.
    """
    rule, by, metric = name.partition(_BY)
    return by_metric(RULES[rule], metric) if by else RULES[rule]


def _seen_by(run: RunRecord, measure: Measure) -> RunRecord | None:
    """Replace the accuracies of a run by the values of a metric; None if it did not record the metric."""
    inside, outside = (measured(run, measure.name, split) for split in ("in", "out"))
    if inside is None or outside is None:
        return None
    if measure.lower_is_better:
        inside, outside = 1.0 - inside, 1.0 - outside
    # NaN is never the best.
    inside, outside = (np.where(np.isnan(values), -1.0, values) for values in (inside, outside))
    return replace(run, accuracy_in=inside, accuracy_out=outside, sizes=None)
