"""From the runs of a sweep to the one that a table reports."""

from collections.abc import Iterable, Sequence

from sandmask.records import RunRecord
from sandmask.selection._base import Selected, SelectionRule


def is_settled(run: RunRecord) -> bool:
    """Whether a run will not change any more: it finished or diverged."""
    return run.status != "running"


def siblings(run: RunRecord, runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs with the same hyperparameters that hold out the run's environment and a second one."""
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
    """What each run offers under a rule, in the order of `hparams_seed`.

    `runs` are those of one dataset, algorithm and trial; the ones that hold out `test_env` alone are judged.
    Runs that are not finished, that hold out every environment, or that the rule cannot judge offer nothing.
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
    """The run and checkpoint that a rule chooses; None when no run is eligible.

    When runs tie, the one with the highest `hparams_seed` is taken. That is what DomainBed's collector does
    (it sorts by value, keeping order, and reads from the end), and where validation accuracies saturate it
    decides the table.
    """
    best: Selected | None = None
    for offer in candidates(rule, runs, test_env):
        if best is None or offer.value >= best.value:
            best = offer
    return best
