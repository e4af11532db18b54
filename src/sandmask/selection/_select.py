"""From the runs of a sweep to the one that a table reports."""

from collections.abc import Iterable, Sequence

from sandmask.records import RunRecord
from sandmask.selection._base import Selected, SelectionRule


def is_settled(run: RunRecord) -> bool:
    """Return whether a run has finished or diverged, so that it will not change any more.

    :param run: record of a run.
    """
    return run.status != "running"


def siblings(run: RunRecord, runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the runs with the same hyperparameters that hold out the run's environment and a second one.

    :param run: record of a run.
    :param runs: runs to search.
    """
    test_env = run.spec.test_envs[0]
    return [
        other
        for other in runs
        if len(other.spec.test_envs) == 2
        and test_env in other.spec.test_envs
        and other.spec.hparams_seed == run.spec.hparams_seed
        and other.spec.hparams == run.spec.hparams
    ]


def candidates(rule: SelectionRule, runs: Sequence[RunRecord], test_env: int) -> list[Selected]:
    """Return what each run offers under a rule, in the order of `hparams_seed`.

    Runs that are not finished, that hold out every environment, or that the rule cannot judge offer nothing.

    :param rule: the selection rule.
    :param runs: runs of one dataset, algorithm and trial.
    :param test_env: environment that a run has to hold out alone.
    """
    settled = [run for run in runs if is_settled(run) and len(run.steps)]
    judged = [run for run in settled if run.spec.test_envs == (test_env,) and run.train_envs]
    judged.sort(key=lambda run: (run.spec.hparams_seed, run.spec.seed, run.spec.id))
    offers = []
    for run in judged:
        choice = rule.choose(run, siblings(run, settled) if rule.needs_pairs else ())
        if choice is not None:
            offers.append(Selected(run, choice.index, choice.value, test_env))
    return offers


def select(rule: SelectionRule, runs: Sequence[RunRecord], test_env: int) -> Selected | None:
    """Return the run and checkpoint that a rule selects; None if no run is eligible.

    Of tied runs, the one with the highest `hparams_seed` is selected, as in DomainBed's collector. Where validation
    accuracies saturate, this decides the table.

    :param rule: the selection rule.
    :param runs: runs of one dataset, algorithm and trial.
    :param test_env: the held-out environment.
    """
    best: Selected | None = None
    for offer in candidates(rule, runs, test_env):
        if best is None or offer.value >= best.value:
            best = offer
    return best
