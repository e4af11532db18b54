"""Pruning: while the runs of a search train, their studies stop the runs that are not promising."""

import math
from collections.abc import Sequence

from sandmask.records import RunSpec
from sandmask.sweeps._folder import SweepFolder
from sandmask.sweeps._optuna import make_pruner, open_journal
from sandmask.training import Trainer
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.keeping import training_mean

RUNGS = 10  # evaluations of a run, at most, at which the pruner is asked


def study_name(spec: RunSpec) -> str:
    """The name of the study that a run belongs to."""
    return f"{spec.dataset} {spec.algorithm} env{spec.test_envs[0]} trial{spec.trial_seed}"


def rungs(spec: RunSpec) -> list[int]:
    """The evaluation steps at which the pruner is asked about a run. The last step is not one of them."""
    steps = list(evaluation_steps(spec.steps, spec.checkpoint_every))[:-1]
    return steps[:: max(1, math.ceil(len(steps) / RUNGS))]


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
