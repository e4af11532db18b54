"""Search: Optuna proposes the hyperparameters of a sweep's runs, and stops unpromising runs.

Every dataset, algorithm, held-out environment and trial has its own study, in `search.journal`. The objective is that
of training-domain selection, so held-out environments are not used. A journal that is lost or damaged is rebuilt from
the records.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sandmask._files import files_below
from sandmask.hparams import seed_hash
from sandmask.records import RunRecord, RunSpec, read_runs
from sandmask.records._archive import ARCHIVE_SUFFIX
from sandmask.selection import SEARCH, mean_over_environments
from sandmask.sweeps._expand import Expansion, search_ranges
from sandmask.sweeps._folder import SweepFolder, stamp_of
from sandmask.sweeps._locks import turn
from sandmask.sweeps._optuna import DamagedJournalError, make_pruner, make_sampler, open_journal
from sandmask.sweeps._pruning import rungs, study_name
from sandmask.sweeps._spec import OPTUNA, SweepSpec

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, TrialState

GENERATIONS = 5  # a fifth of a study's runs train at a time, and the study learns from the others


@dataclass(frozen=True)
class _Result:
    """What a study learns from the record of a run that has ended.

    A run that diverged is judged by its earlier evaluations, as in selection; it has failed if there are none.
    """

    spec: RunSpec
    state: "TrialState"
    value: float | None  # the objective; None if there is no evaluation
    intermediate_values: dict[int, float]  # the objective at rungs


def _result(run: RunRecord) -> _Result:
    from optuna.trial import TrialState

    values = mean_over_environments(run.accuracy_out[:, run.train_envs])
    curve = dict(zip(run.steps.tolist(), values.tolist(), strict=True))
    at_rungs = {step: curve[step] for step in rungs(run.spec) if step in curve}
    if not curve:
        return _Result(run.spec, TrialState.FAIL, None, at_rungs)
    state = TrialState.PRUNED if run.status == "pruned" else TrialState.COMPLETE
    return _Result(run.spec, state, float(values.max()), at_rungs)


@cache
def _results_in(file: Path, stamp: tuple[int, int]) -> list[_Result]:  # noqa: ARG001 - read again when it changes
    return [_result(run) for run in read_runs(file) if SEARCH in run.spec.options]


class Search:
    """The studies of a sweep in its folder.

    :param folder: the sweep's folder.
    :param sweep: the sweep.
    :param expansion: its runs with random draws, from `expand`: they stand for runs that are not proposed yet.
    :param notice: called with a message if the journal is damaged, which is replaced then; an error if not given.
    """

    def __init__(
        self,
        folder: SweepFolder,
        sweep: SweepSpec,
        expansion: Expansion,
        notice: Callable[[str], object] | None = None,
    ) -> None:
        self.folder, self.sweep = folder, sweep
        self._storage = _open_or_replace(folder.journal, notice)
        ranges = cache(lambda dataset, algorithm: search_ranges(sweep, expansion.sources[dataset], algorithm))
        templates: defaultdict[str, list[RunSpec]] = defaultdict(list)
        for spec in expansion.runs:  # in the order of their numbers
            templates[study_name(spec)].append(spec)
        self._studies = [
            _Study(self._storage, sweep, runs, ranges(runs[0].dataset, runs[0].algorithm))
            for runs in templates.values()
        ]

    @property
    def at_a_time(self) -> int:
        """The number of runs that are under way at a time."""
        return sum(study.batch for study in self._studies)

    def _read_results(self) -> None:
        """Give each study the results of its finished runs."""
        found: defaultdict[str, list[_Result]] = defaultdict(list)
        for file in files_below(self.folder.path, ARCHIVE_SUFFIX):
            for result in _results_in(file, stamp_of(file)):
                found[study_name(result.spec)].append(result)
        for study in self._studies:
            study.set_results(found[study.name])

    def runs(self) -> tuple[RunSpec, ...]:
        """Every run of the sweep: those that were proposed, and stand-ins for the others. Nothing is written."""
        self._read_results()
        return tuple(run for study in self._studies for run in study.runs())

    def propose(self, failed: Collection[str] = ()) -> list[RunSpec]:
        """Tell the studies what has finished, and ask them for new runs. Return all runs proposed so far.

        :param failed: ids of runs that could not be trained, in whose place others are proposed.
        """
        with turn(self.folder.path):  # two programs must not ask for the same number
            self._read_results()
            for study in self._studies:
                study.advance(failed)
            return [run for study in self._studies for run in study.proposed().values()]


def open_search(
    folder: SweepFolder, sweep: SweepSpec, expansion: Expansion, notice: Callable[[str], object] | None = None
) -> Search | None:
    """Return the search of a sweep; None for a sweep with random draws.

    :param folder: the sweep's folder.
    :param sweep: the sweep.
    :param expansion: its runs, from `expand`.
    :param notice: see `Search`.
    """
    return Search(folder, sweep, expansion, notice) if sweep.search == OPTUNA else None


def _open_or_replace(path: Path, notice: Callable[[str], object] | None) -> "JournalStorage":
    try:
        return open_journal(path)
    except DamagedJournalError as error:
        if notice is None:
            raise
        path.replace(path.with_suffix(".damaged"))
        notice(f"{str(error).partition('. ')[0]}; the search continues from the records.")
        return open_journal(path)


class _Study:
    """The study of a dataset, an algorithm, a held-out environment and a trial.

    Proposal n has the same number in the journal (trial n), and is the run of draw n with other hyperparameters.
    """

    def __init__(
        self,
        storage: "JournalStorage",
        sweep: SweepSpec,
        templates: Sequence[RunSpec],
        ranges: Mapping[str, "BaseDistribution"],
    ) -> None:
        self.name = study_name(templates[0])
        self.batch = math.ceil(len(templates) / GENERATIONS)
        self._storage, self._sweep, self._templates, self._ranges = storage, sweep, templates, dict(ranges)
        self._results: dict[int, _Result] = {}  # of finished runs, by number

    def set_results(self, results: Iterable[_Result]) -> None:
        """Keep the results of this study's runs. The folder may also have records of other sweeps."""
        self._results = {
            number: result
            for result in results
            if (number := result.spec.hparams_seed) < len(self._templates)
            and self._run(number, result.spec.hparams) == result.spec
        }

    def runs(self) -> list[RunSpec]:
        """The runs that were proposed, and the templates of the others."""
        proposed = self.proposed()
        return [proposed.get(number, template) for number, template in enumerate(self._templates)]

    def proposed(self) -> dict[int, RunSpec]:
        """The runs that were proposed, by number; finished ones as they were trained."""
        found = {trial.number: self._run(trial.number, trial.params) for trial in filter(_is_proposed, self._trials())}
        return {**found, **{number: result.spec for number, result in self._results.items()}}

    def _run(self, number: int, values: Mapping[str, float]) -> RunSpec:
        """The run of a number with these values of the hyperparameters that are searched."""
        template = self._templates[number]
        searched = {name: value for name, value in values.items() if name in self._ranges}
        return replace(template, hparams={**template.hparams, **searched})

    def _trials(self) -> list["FrozenTrial"]:
        """The trials in the journal; none if the study is not in it yet."""
        try:
            study_id = self._storage.get_study_id_from_name(self.name)
        except KeyError:
            return []
        return self._storage.get_all_trials(study_id, deepcopy=False)

    @cached_property
    def _study(self) -> "Study":
        """Optuna's object. The study is created in the journal if it is not in it yet."""
        from optuna import create_study, load_study

        pruner = make_pruner(self._sweep.pruner, self._templates[0])
        try:
            return load_study(study_name=self.name, storage=self._storage, pruner=pruner)
        except KeyError:
            return create_study(study_name=self.name, storage=self._storage, pruner=pruner, direction="maximize")

    def advance(self, failed: Collection[str]) -> None:
        """Report results, and ask for as many new runs as should train at a time."""
        from optuna.trial import TrialState

        self._restore_trials()
        self._finish_trials()
        trials, proposed = self._trials(), self.proposed()
        if not trials:
            self._study.enqueue_trial(self._defaults())
        running = [trial.number for trial in trials if trial.state == TrialState.RUNNING]
        under_way = sum(proposed[number].id not in failed for number in running)
        so_far = sum(map(_is_proposed, trials))
        for number in range(so_far, min(len(self._templates), so_far + self.batch - under_way)):
            self._study.sampler = make_sampler(self._sweep.sampler, seed_hash(self.name, self._sweep.seed), number)
            self._study.ask(self._ranges)

    def _restore_trials(self) -> None:
        """Add the trials of finished runs that the journal has lost."""
        from optuna.trial import create_trial

        for number in range(len(self._trials()), max(self._results, default=-1) + 1):
            if number not in self._results:
                self._study.enqueue_trial({})  # this run has not finished; another one will be proposed in its place
                continue
            result = self._results[number]
            self._study.add_trial(
                create_trial(
                    state=result.state,
                    value=result.value,
                    params={name: result.spec.hparams[name] for name in self._ranges},
                    distributions=self._ranges,
                    intermediate_values=result.intermediate_values,
                )
            )

    def _finish_trials(self) -> None:
        """Tell Optuna the results of runs that have ended."""
        from optuna.trial import TrialState

        for trial in self._trials():
            if trial.state == TrialState.RUNNING and trial.number in self._results:
                result = self._results[trial.number]
                # Optuna takes the value of a pruned trial from its intermediate values.
                value = result.value if result.state == TrialState.COMPLETE else None
                self._study.tell(trial.number, value, result.state)

    def _defaults(self) -> dict[str, float]:
        """The defaults, as in draw 0, as far as they are within the ranges."""
        values = self._templates[0].hparams
        return {name: values[name] for name, kind in self._ranges.items() if _contains(kind, values[name])}


def _contains(kind: "BaseDistribution", value: float) -> bool:
    choices = getattr(kind, "choices", None)
    return value in choices if choices is not None else kind.low <= value <= kind.high  # type: ignore[attr-defined]


def _is_proposed(trial: "FrozenTrial") -> bool:
    """Whether a trial has hyperparameters. A waiting trial gets them when Optuna is next asked for a proposal."""
    from optuna.trial import TrialState

    return trial.state != TrialState.WAITING
