"""Methods that are put together: a rule for gradients, such as a mask, on the gradients of an objective."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm, Hparams, Metrics, ObjectiveAlgorithm, Problem, State
from sandmask.algorithms._combined import CombinedGradients
from sandmask.algorithms._copies import EnvironmentCopies
from sandmask.algorithms._masked import MaskedAlgorithm
from sandmask.algorithms._sharpness import SharpnessAware
from sandmask.functional import random
from sandmask.functional.batch import EnvBatch
from sandmask.functional.flat import Params
from sandmask.masks import TensorMoments

Rule = MaskedAlgorithm | CombinedGradients
_RULE = 2000  # the rule's random numbers: a stream apart from the objective's


class Composed(Algorithm):
    """The update that `rule` makes of the environments' gradients g_e of an objective J; all else is the objective's.

    g_e = E dJ/dw_e, where w_e are the parameters as environment e's examples see them: the gradients of J owed to each
    environment, with grad J as their mean. For ERM, g_e is the gradient of R_e; for VREx it is (1 + 2 beta (R_e -
    mean R)) times that. The objective's penalties, schedules and further state are as it has them alone.

    With `sharpness`, the gradient of that method (or of the objective, without a rule) is taken twice: where the
    parameters are, and where a step along it leads.
    """

    def __init__(self, objective: ObjectiveAlgorithm, rule: Rule | None, sharpness: SharpnessAware | None) -> None:
        self.problem, self.network = objective.problem, objective.network
        self.objective, self.rule, self.sharpness = objective, rule, sharpness
        self.uses_context, self.averaged = objective.uses_context, objective.averaged
        self.training_only = objective.training_only + (() if rule is None else rule.training_only)
        self.stacks_by_kernels, self.divides = objective.stacks_by_kernels, objective.divides
        for part in (rule, sharpness):
            if part is not None:
                part.network = self.network
        self._of_copies = copy.copy(objective)
        self._of_copies.network = EnvironmentCopies(self.network)

    def use(self, problem: Problem) -> None:
        """Take gradients as this problem says."""
        for part in (self.objective, self._of_copies, self.rule, self.sharpness):
            if part is not None:
                part.use(problem)
        super().use(problem)

    def to(self, device: torch.device) -> "Composed":
        """Move the constants of the networks."""
        self.objective.to(device)
        return self

    @property
    def is_network(self) -> bool:
        """As for the objective."""
        return self.objective.is_network

    def init(self, seed: int) -> State:
        """The objective's state, and the rule's."""
        return {**self.objective.init(seed), **({} if self.rule is None else self.rule.extra_state(seed))}

    def predict(self, state: State, x: Tensor) -> Tensor:
        """The objective's prediction."""
        return self.objective.predict(state, x)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""

        def found_at(vector: Tensor) -> _Found:
            return self._found(vector, state, batch, hparams, key)

        here = found_at(state["params"])
        gradient = here.gradient
        if self.sharpness is not None:
            gradient = self.sharpness.aware(
                gradient, state["params"], lambda vector: found_at(vector).gradient, hparams
            )
        state, metrics = self.objective.update(state, gradient, here.loss, here.changes, hparams)
        return state, {**metrics, **here.metrics}

    def _found(self, vector: Tensor, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> "_Found":
        """The gradient at these parameters, after the rule."""
        differentiate, n_envs = self.problem.differentiate, batch.n_envs
        if self.rule is None:
            gradient, loss, changes = differentiate.gradient(
                lambda vector: self.objective.value(vector, state, batch, hparams, key), vector
            )
            return _Found(gradient, loss, changes, {})

        def total(vectors: Tensor) -> tuple[Tensor, tuple[Tensor, State]]:
            value, changes = self._of_copies.value(vectors, state, batch, hparams, key)
            return n_envs * value, (value, changes)

        gradients, _, (loss, changes) = differentiate.gradient(total, vector.expand(n_envs, -1))
        gradient, of_rule, metrics = self.rule.direction(state, gradients, hparams, random.fold(key, _RULE))
        return _Found(gradient, loss, {**changes, **of_rule}, metrics)

    # What a program for masks asks for, which takes the moments of the gradients in one pass; see `MaskedAlgorithm`.

    def terms(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """E J: its gradient by environment e's examples is g_e."""
        value, changes = self.objective.objective(params, state, batch, hparams, key)
        return batch.n_envs * value, changes

    def finish(
        self, state: State, moments: TensorMoments, values: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        """The second half of a step, once the moments of the gradients are known."""
        assert isinstance(self.rule, MaskedAlgorithm)
        gradient, of_rule, metrics = self.rule.masked(state, moments, hparams)
        loss, changes = values / moments.count, {**changes, **of_rule}
        state, of_objective = self.objective.update(state, gradient, loss, changes, hparams)
        return state, {**of_objective, **metrics}


class _Found(NamedTuple):
    gradient: Tensor
    loss: Tensor
    changes: State
    metrics: Metrics
