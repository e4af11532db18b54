"""Search: Optuna proposes the hyperparameters of a sweep's runs, and stops unpromising runs.

Every dataset, algorithm, held-out environment and trial has its own study, in `search.journal`. The objective is that
of training-domain selection, so held-out environments are not used. A journal that is lost or damaged is rebuilt from
the records.
"""

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
from sandmask.sweeps._spec import OPTUNA, SweepSpec
from sandmask.training import Trainer
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.keeping import training_mean

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, TrialState

GENERATIONS = 5  # a fifth of a study's runs train at a time, and the study learns from the others
RUNGS = 10  # evaluations of a run, at most, at which the pruner is asked


def study_name(spec: RunSpec) -> str:
    """The name of the study that a run belongs to."""
    return f"{spec.dataset} {spec.algorithm} env{spec.test_envs[0]} trial{spec.trial_seed}"


def rungs(spec: RunSpec) -> list[int]:
    """The evaluation steps at which the pruner is asked about a run. The last step is not one of them."""
    steps = list(evaluation_steps(spec.steps, spec.checkpoint_every))[:-1]
    return steps[:: -(-len(steps) // RUNGS) or 1]


@dataclass(frozen=True)
class _Result:
    """What a study learns from the record of a run; `value` is None where there is no evaluation."""

    spec: RunSpec
    status: str
    value: float | None
    curve: Mapping[int, float]  # by rung

    @property
    def state(self) -> "TrialState":
        """Optuna's state. A run that diverged is judged by its earlier evaluations, as in selection."""
        from optuna.trial import TrialState

        ended = TrialState.PRUNED if self.status == "pruned" else TrialState.COMPLETE
        return TrialState.FAIL if self.value is None else ended


def _result(run: RunRecord) -> _Result:
    values = mean_over_environments(run.accuracy_out[:, run.train_envs])
    curve = dict(zip(run.steps.tolist(), values.tolist(), strict=True))
    value = float(values.max()) if len(values) else None
    return _Result(run.spec, run.status, value, {step: curve[step] for step in rungs(run.spec) if step in curve})


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
        templates: defaultdict[str, list[RunSpec]] = defaultdict(list)
        for spec in expansion.runs:  # in the order of their numbers
            templates[study_name(spec)].append(spec)
        ranges = cache(lambda dataset, algorithm: search_ranges(sweep, expansion.sources[dataset], algorithm))
        self._studies = {
            name: _Study(self._storage, sweep, own, ranges(own[0].dataset, own[0].algorithm))
            for name, own in templates.items()
        }

    @property
    def at_a_time(self) -> int:
        """The number of runs that are under way at a time."""
        return sum(study.batch for study in self._studies.values())

    def _results(self) -> dict[str, dict[int, _Result]]:
        """The results of finished runs, by study and number."""
        found: defaultdict[str, list[_Result]] = defaultdict(list)
        for file in files_below(self.folder.path, ARCHIVE_SUFFIX):
            for result in _results_in(file, stamp_of(file)):
                found[study_name(result.spec)].append(result)
        return {name: study.own(found[name]) for name, study in self._studies.items()}

    def runs(self) -> tuple[RunSpec, ...]:
        """Every run of the sweep: those that were proposed, and stand-ins for the others. Nothing is written."""
        results = self._results()
        known = {study.study_name for study in self._storage.get_all_studies()}
        found: list[RunSpec] = []
        for name, study in self._studies.items():
            proposed = study.proposed(study.trials() if name in known else [], results[name])
            found += [proposed.get(number, like) for number, like in enumerate(study.templates)]
        return tuple(found)

    def propose(self, failed: Collection[str] = ()) -> list[RunSpec]:
        """Tell the studies what has finished, and ask them for new runs. Return all runs proposed so far.

        :param failed: ids of runs that could not be trained, in whose place others are proposed.
        """
        with turn(self.folder.path):  # two programs must not ask for the same number
            results = self._results()
            found: list[RunSpec] = []
            for name, study in self._studies.items():
                study.advance(results[name], failed)
                found += study.proposed(study.trials(), results[name]).values()
            return found


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
    """One study: a dataset, an algorithm, a held-out environment and a trial. Number n is the run of draw n."""

    def __init__(
        self,
        storage: "JournalStorage",
        sweep: SweepSpec,
        templates: Sequence[RunSpec],
        ranges: Mapping[str, "BaseDistribution"],
    ) -> None:
        self._storage, self._sweep, self.templates, self._ranges = storage, sweep, templates, dict(ranges)
        self.name = study_name(templates[0])
        self.batch = -(-len(templates) // GENERATIONS)

    def own(self, results: Iterable[_Result]) -> dict[int, _Result]:
        """The results that are of this study's runs, by number. The folder may have records of other sweeps."""
        return {
            number: result
            for result in results
            if (number := result.spec.hparams_seed) < len(self.templates)
            and self._filled(number, result.spec.hparams) == result.spec
        }

    def _filled(self, number: int, values: Mapping[str, float]) -> RunSpec:
        """The run of a number with these values of what is searched."""
        template = self.templates[number]
        return replace(template, hparams={**template.hparams, **{k: v for k, v in values.items() if k in self._ranges}})

    def trials(self) -> list["FrozenTrial"]:
        """The study's trials in the journal."""
        return self._storage.get_all_trials(self._storage.get_study_id_from_name(self.name), deepcopy=False)

    def proposed(self, trials: Iterable["FrozenTrial"], results: Mapping[int, _Result]) -> dict[int, RunSpec]:
        """The runs that were proposed, by number; finished ones as they were trained."""
        asked = {trial.number: self._filled(trial.number, trial.params) for trial in trials if not _is_waiting(trial)}
        return {**asked, **{number: result.spec for number, result in results.items()}}

    @cached_property
    def _study(self) -> "Study":
        from optuna import create_study, load_study

        pruner = make_pruner(self._sweep.pruner, self.templates[0])
        if self.name in {study.study_name for study in self._storage.get_all_studies()}:
            return load_study(study_name=self.name, storage=self._storage, pruner=pruner)
        return create_study(study_name=self.name, storage=self._storage, pruner=pruner, direction="maximize")

    def advance(self, results: Mapping[int, _Result], failed: Collection[str]) -> None:
        """Report results, and ask for as many new runs as should train at a time."""
        from optuna.trial import TrialState

        study = self._study
        self._tell(results)
        trials = self.trials()
        if not trials:
            study.enqueue_trial(self._defaults())
        specs = self.proposed(trials, results)
        running = [trial.number for trial in trials if trial.state == TrialState.RUNNING]
        under_way = sum(specs[number].id not in failed for number in running)
        asked = sum(not _is_waiting(trial) for trial in trials)
        for number in range(asked, min(len(self.templates), asked + self.batch - under_way)):
            study.sampler = make_sampler(self._sweep.sampler, seed_hash(self.name, self._sweep.seed), number)
            study.ask(self._ranges)

    def _tell(self, results: Mapping[int, _Result]) -> None:
        """Finish the trials of runs that have ended. Trials that the journal has lost are added again."""
        from optuna.trial import TrialState, create_trial

        trials = self.trials()
        for number in range(len(trials), max(results, default=-1) + 1):
            if number not in results:
                self._study.enqueue_trial({})  # this run was training; another one is proposed instead
                continue
            result = results[number]
            self._study.add_trial(
                create_trial(
                    state=result.state,
                    value=result.value,
                    params={name: result.spec.hparams[name] for name in self._ranges},
                    distributions=self._ranges,
                    intermediate_values=dict(result.curve),
                )
            )
        for trial in trials:
            if trial.state == TrialState.RUNNING and trial.number in results:
                result = results[trial.number]
                value = result.value if result.state == TrialState.COMPLETE else None
                self._study.tell(trial.number, value, result.state)

    def _defaults(self) -> dict[str, float]:
        """The defaults, number 0 of random draws too, that are within the ranges."""
        values = self.templates[0].hparams
        return {name: values[name] for name, kind in self._ranges.items() if _contains(kind, values[name])}


def _contains(kind: "BaseDistribution", value: float) -> bool:
    choices = getattr(kind, "choices", None)
    return value in choices if choices is not None else kind.low <= value <= kind.high  # type: ignore[attr-defined]


def _is_waiting(trial: "FrozenTrial") -> bool:
    from optuna.trial import TrialState

    return trial.state == TrialState.WAITING


class Pruning:
    """Asks the pruner about the runs of a stack while they train, as `on_evaluation` of `train_stack`.

    Once half of the runs are pruned, the stack stops, and the others continue from its checkpoint as a smaller stack.

    :param folder: the sweep's folder.
    :param specs: the runs of the stack.
    :param pruner: one of `PRUNERS`.
    """

    def __init__(self, folder: SweepFolder, specs: Sequence[RunSpec], pruner: str) -> None:
        from optuna import load_study
        from optuna.samplers import RandomSampler

        self.specs, self.rungs = specs, rungs(specs[0])
        self._storage = open_journal(folder.journal)
        self._studies = {
            name: load_study(
                study_name=name,
                storage=self._storage,
                sampler=RandomSampler(),  # is not used
                pruner=make_pruner(pruner, specs[0]),
            )
            for name in map(study_name, specs)
        }

    def __call__(self, trainer: Trainer, step: int) -> None:
        """Report the accuracies of an evaluation at a rung, prune runs, and stop the stack if half of them are."""
        at_rung = step in self.rungs
        if at_rung:
            self._report(trainer, step)
        if at_rung or step == trainer.steps - 1:
            self._mark_pruned(trainer, step)
        trainer.stopping = at_rung and 2 * len(trainer.pruned_at) >= len(self.specs)

    def _report(self, trainer: Trainer, step: int) -> None:
        """Report the accuracy of every run that trains to its study, and prune the run if the pruner says so."""
        from optuna.trial import TrialState

        outside, diverged_at = trainer.history.accuracies(step).outside, trainer.diverged_at
        for k, spec in enumerate(self.specs):
            trial_id = self._trial_id(spec)
            # The trial of a run that trains again because its record was lost may be finished.
            if diverged_at[k] >= 0 or self._storage.get_trial(trial_id).state.is_finished():
                continue
            self._storage.set_trial_intermediate_value(trial_id, step, training_mean(outside[k], spec))
            study = self._studies[study_name(spec)]
            if study.pruner.prune(study, self._storage.get_trial(trial_id)):
                study.tell(spec.hparams_seed, state=TrialState.PRUNED)

    def _mark_pruned(self, trainer: Trainer, step: int) -> None:
        """Set the step of pruned runs. After an interruption, the stack may be at an earlier step than its studies."""
        from optuna.trial import TrialState

        for k, spec in enumerate(self.specs):
            trial = self._storage.get_trial(self._trial_id(spec))
            last_step = step if trial.last_step is None else trial.last_step
            if trial.state == TrialState.PRUNED and last_step <= step:
                trainer.pruned_at.setdefault(k, last_step)

    def _trial_id(self, spec: RunSpec) -> int:
        study_id = self._storage.get_study_id_from_name(study_name(spec))
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, spec.hparams_seed)
