"""One trial of one cell: what a rule chose, and what is missing."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sandmask._text import printable
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord
from sandmask.records._types import held_out_environments
from sandmask.reports._data import Gap, Trial
from sandmask.selection import SEARCH, SelectionRule, is_settled, select, siblings


@dataclass(frozen=True)
class Expected:
    """The environments, trials and draws of a dataset's complete cells."""

    environments: tuple[str, ...]
    reported: tuple[str, ...]  # the environments that a complete table has
    trials: tuple[int, ...]
    draws: tuple[int, ...]
    proposals: tuple[int, ...] = ()  # instead of draws, where a search made them


def expected_of(runs: Sequence[RunRecord], draws: int | None, trials: int | None) -> Expected:
    """The expected content of a complete sweep; by default, the most that any cell has."""
    names = runs[0].env_names
    for run in runs:
        if run.env_names != names:
            raise SandmaskError(
                f"Runs of dataset {run.spec.dataset!r} name different environments: {printable(', '.join(names))} and "
                f"{printable(', '.join(run.env_names))}. They are not one dataset: report them from separate folders."
            )
    seen_trials = sorted({run.spec.trial_seed for run in runs})
    drawn = [run for run in runs if "soup" not in run.spec.options] or runs
    seen_draws = sorted({run.spec.hparams_seed for run in drawn if SEARCH not in run.spec.options})
    proposed = sorted({run.spec.hparams_seed for run in drawn if SEARCH in run.spec.options})
    return Expected(
        environments=names,
        reported=_reported(runs[0].spec.dataset, names),
        trials=tuple(seen_trials if trials is None else range(trials)),
        draws=tuple(seen_draws if draws is None else range(draws)),
        proposals=tuple(proposed if draws is None else range(draws)),
    )


def _reported(dataset: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The environments that the benchmark holds out (16 of the 17 of Spirals), or all of another dataset.

    This decides which averages are marked as partial. Columns come from the records.
    """
    known = held_out_environments(dataset)
    return known if known and known == names[: len(known)] else names


def settle_trial(
    rule: SelectionRule, runs: Sequence[RunRecord], test_env: int, trial_seed: int, draws: Sequence[int]
) -> Trial:
    """Apply a rule to one trial's runs of a cell and take stock of what it had to choose from."""
    alone = [run for run in runs if run.spec.test_envs == (test_env,)]
    of_draw: defaultdict[int, list[RunRecord]] = defaultdict(list)
    for run in alone:
        of_draw[run.spec.hparams_seed].append(run)
    gaps = []
    for draw in draws:
        why = _why_missing(rule, of_draw.get(draw, []), runs)
        if why is not None:
            gaps.append(Gap(trial_seed, draw, why))
    considered = [run for run in runs if rule.needs_pairs or len(run.spec.test_envs) == 1]
    selected = select(rule, runs, test_env)
    if selected is None and not gaps and any(run.status == "done" for run in alone):
        gaps = [Gap(trial_seed, draw, "no checkpoint that the rule would take") for draw in draws]
    return Trial(
        trial_seed=trial_seed,
        selected=selected,
        expected=len(draws),
        gaps=tuple(gaps),
        diverged=tuple(_describe_divergence(run) for run in considered if run.status == "diverged"),
    )


def _why_missing(rule: SelectionRule, drawn: Sequence[RunRecord], runs: Sequence[RunRecord]) -> str | None:
    """None when a draw's run can be judged; else what keeps the rule from it, or "" for nothing there."""
    if not drawn:
        return ""
    unfinished = [_progress(run) for run in drawn if not is_settled(run)]
    if unfinished:
        return unfinished[0]
    if rule.lacks(drawn[-1]):
        return f"without {' and '.join(rule.needs_metrics)}"
    if not rule.needs_pairs:
        return None
    run = drawn[-1]
    pairs = siblings(run, runs)
    for environment in run.train_envs:
        found = [pair for pair in pairs if environment in pair.spec.test_envs]
        if len(found) != 1:
            number = "no run holds" if not found else f"{len(found)} runs hold"
            return f"{number} out {run.env_names[environment]} as well"
        if not is_settled(found[0]):
            return f"with {run.env_names[environment]} {_progress(found[0])}"
    return None


def _progress(run: RunRecord) -> str:
    at = int(run.steps[-1]) if len(run.steps) else 0
    return f"at step {at} of {run.spec.steps}"


def _describe_divergence(run: RunRecord) -> str:
    return f"trial {run.spec.trial_seed} draw {run.spec.hparams_seed} at step {run.diverged_at}"
