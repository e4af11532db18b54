"""Composed methods, such as `SANDMask+VREx`, `SAM+CORAL` and `SAM+ANDMask+IRM`.

They apply a rule for gradients (such as a mask), a sharpness-aware method, or both, to the gradients of an objective.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from sandmask.algorithms._base import Algorithm, AlgorithmEntry, ObjectiveAlgorithm, Problem
from sandmask.algorithms._copies import EnvironmentCopies
from sandmask.algorithms._functions import Hparams, Metrics, State
from sandmask.algorithms._rules import CombinedGradients, LogMaskedAlgorithm, MaskedAlgorithm, SharpnessAware
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch, Params, random
from sandmask.masks import TensorMoments

Rule = MaskedAlgorithm | CombinedGradients
Kind = Literal["sharpness", "rule", "objective"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order of a composition's name
PLAIN = "ERM"  # the objective if none is named
_PLURAL: Mapping[Kind, str] = {
    "sharpness": "sharpness-aware methods",
    "rule": "rules for gradients",
    "objective": "objectives",
}
_RULE = 2000  # stream of the rule's random numbers, separate from the objective's


class Composed(Algorithm):
    """Computes the update by applying `rule` to the environments' gradients g_e of an objective J.

    g_e = E dJ/dw_e, where w_e are the parameters as used for the examples of environment e. The mean of all g_e is
    grad J. For ERM, g_e is the gradient of R_e; for VREx, it is this gradient times (1 + 2 beta (R_e - mean R)). The
    penalties, schedules and further state of the objective are the same as without a rule.

    With `sharpness`, the gradient after the rule (if there is one) is computed twice: at the parameters, and after a
    step uphill along it.
    """

    through_logits = False  # unknown for objectives; see `MaskedAlgorithm`

    def __init__(self, objective: ObjectiveAlgorithm, rule: Rule | None, sharpness: SharpnessAware | None) -> None:
        self.problem, self.network = objective.problem, objective.network
        self.objective, self.rule, self.sharpness = objective, rule, sharpness
        self.uses_context, self.averaged = objective.uses_context, objective.averaged
        self.training_only = objective.training_only + (() if rule is None else rule.training_only)
        self.stacks_by_kernels, self.captures = objective.stacks_by_kernels, objective.captures
        self.divides = objective.divides
        self.reads = "within" if rule is not None and objective.reads == "examples" else objective.reads
        for part in (rule, sharpness):
            if part is not None:
                part.network = self.network
        self._of_copies = copy.copy(objective)
        self._of_copies.network = EnvironmentCopies(self.network)

    def use(self, problem: Problem) -> None:
        """Replace the problem of all parts."""
        for part in (self.objective, self._of_copies, self.rule, self.sharpness):
            if part is not None:
                part.use(problem)
        super().use(problem)

    def to(self, device: torch.device) -> "Composed":
        """Move the constants of the networks to a device."""
        self.objective.to(device)
        return self

    @property
    def is_network(self) -> bool:
        """Whether predictions are the logits of an ordinary network. This depends on the objective."""
        return self.objective.is_network

    def init(self, seed: int) -> State:
        """Return the state of the objective and of the rule."""
        return {**self.objective.init(seed), **({} if self.rule is None else self.rule.extra_state(seed))}

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Return the prediction of the objective."""
        return self.objective.predict(state, x)

    def step(self, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> tuple[State, Metrics]:
        """One update."""
        gradient, loss, changes, metrics = self._gradient(state["params"], state, batch, hparams, key)
        if self.sharpness is not None:

            def gradient_at(vector: Tensor) -> Tensor:
                return self._gradient(vector, state, batch, hparams, key)[0]

            gradient = self.sharpness.aware(gradient, state["params"], gradient_at, hparams)
        state, of_objective = self.objective.update(state, gradient, loss, changes, hparams)
        return state, {**of_objective, **metrics}

    def _gradient(
        self, vector: Tensor, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, Tensor, State, Metrics]:
        """Return the gradient at `vector` after the rule, the objective's value, changes of the state, and metrics."""
        differentiate, n_envs = self.problem.differentiate, batch.n_envs
        if self.rule is None:
            gradient, loss, changes = differentiate.gradient(
                lambda vector: self.objective.value(vector, state, batch, hparams, key), vector
            )
            return gradient, loss, changes, {}

        def total(vectors: Tensor) -> tuple[Tensor, tuple[Tensor, State]]:
            value, changes = self._of_copies.value(vectors, state, batch, hparams, key)
            return n_envs * value, (value, changes)

        gradients, _, (loss, changes) = differentiate.gradient(total, vector.expand(n_envs, -1))
        gradient, of_rule, metrics = self.rule.direction(state, gradients, hparams, random.fold(key, _RULE))
        return gradient, loss, {**changes, **of_rule}, metrics

    # The methods below are for programs that compute the moments of gradients in one pass; see `MaskedAlgorithm`.

    def terms(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        """Return E J and changes of the state. The examples of environment e contribute g_e to the gradient of E J."""
        value, changes = self.objective.objective(params, state, batch, hparams, key)
        return batch.n_envs * value, changes

    def finish(
        self, state: State, moments: TensorMoments, values: Tensor, changes: State, hparams: Hparams
    ) -> tuple[State, Metrics]:
        """Complete a step, given the moments of the gradients and the results of `terms`."""
        assert isinstance(self.rule, MaskedAlgorithm)
        gradient, of_rule, metrics = self.rule.masked(state, moments, hparams)
        loss, changes = values / moments.count, {**changes, **of_rule}
        state, of_objective = self.objective.update(state, gradient, loss, changes, hparams)
        return state, {**of_objective, **metrics}


def kind_of(entry: AlgorithmEntry) -> Kind | None:
    """Return the kind of an algorithm in a composition, or None if it has its own `step` and cannot be composed."""
    build = entry.build
    if not isinstance(build, type):
        return None
    if issubclass(build, SharpnessAware) and build.step is SharpnessAware.step:
        return "sharpness"
    if issubclass(build, CombinedGradients) and build.step is CombinedGradients.step:
        return "rule"
    if issubclass(build, MaskedAlgorithm) and _is_its_mask(build):
        return "rule"
    if issubclass(build, ObjectiveAlgorithm) and build.step is ObjectiveAlgorithm.step:
        return "objective"
    return None


def _is_its_mask(build: type[MaskedAlgorithm]) -> bool:
    """Whether a method consists only of its mask, or of its own `direction`."""
    steps = build.step in (MaskedAlgorithm.step, LogMaskedAlgorithm.step)
    steps = steps or build.direction is not MaskedAlgorithm.direction
    others = ("update", "risks", "predict")
    return steps and all(getattr(build, name) is getattr(MaskedAlgorithm, name) for name in others)


def compose(name: str, parts: Sequence[AlgorithmEntry], known: Iterable[AlgorithmEntry]) -> AlgorithmEntry:
    """Return the entry of a composition. The order of the parts does not matter, and ERM changes nothing.

    :param name: name of the composition in messages.
    :param parts: entries of the parts.
    :param known: entries of all algorithms, of which messages list those that compose.
    """
    known = list(known)
    chosen: dict[Kind, AlgorithmEntry] = {}
    for entry in parts:
        kind = kind_of(entry)
        if kind is None:
            raise _refusal(name, f"{entry.name} is neither an objective nor a rule for gradients.", known)
        if kind in chosen:
            both = f"{chosen[kind].name} and {entry.name}"
            raise _refusal(name, f"{both} are both {_PLURAL[kind]}.", known)
        chosen[kind] = entry
    named = [chosen[kind] for kind in KINDS if kind in chosen and chosen[kind].name != PLAIN]
    if len(named) < 2:
        return (named or list(chosen.values()))[0]
    if "rule" in chosen and "objective" in chosen and not _is_by_environment(chosen["objective"]):
        raise _refusal(name, f"{chosen['objective'].name}'s gradient cannot be split by environment.", known)
    _check_names(name, named)
    chosen.setdefault("objective", next(entry for entry in known if entry.name == PLAIN))

    def build(problem: Problem) -> Composed:
        objective, rule, sharpness = (
            chosen[kind].build(problem) if kind in chosen else None for kind in ("objective", "rule", "sharpness")
        )
        assert isinstance(objective, ObjectiveAlgorithm)
        assert rule is None or isinstance(rule, MaskedAlgorithm | CombinedGradients)
        assert sharpness is None or isinstance(sharpness, SharpnessAware)
        return Composed(objective, rule, sharpness)

    def caution(hparams: Mapping[str, float]) -> str | None:
        return next((found for entry in named if (found := entry.caution(hparams)) is not None), None)

    return AlgorithmEntry(
        name="+".join(entry.name for entry in named),
        summary=" on the gradients of ".join(entry.name for entry in named),
        paper="; ".join(dict.fromkeys(entry.paper for entry in named)),
        build=build,
        hparams=[row for entry in reversed(named) for row in entry.hparams],
        compares_environments=any(entry.compares_environments for entry in named),
        caution=caution,
    )


def _is_by_environment(entry: AlgorithmEntry) -> bool:
    return bool(getattr(entry.build, "by_environment", False))


def _check_names(name: str, parts: Sequence[AlgorithmEntry]) -> None:
    """Raise an error if two parts have a hyperparameter of the same name."""
    seen: dict[str, str] = {}
    for entry in parts:
        for row in {row.name for row in entry.hparams}:
            if row in seen:
                raise SandmaskError(
                    f"{name!r} cannot be composed: {seen[row]} and {entry.name} both have a hyperparameter {row!r}. "
                    "Rename it in one of them."
                )
            seen[row] = entry.name


def _refusal(name: str, reason: str, known: Sequence[AlgorithmEntry]) -> SandmaskError:
    of_kind = {kind: [entry for entry in known if kind_of(entry) == kind] for kind in KINDS}
    lists = "; ".join(f"{_PLURAL[kind]}: {', '.join(e.name for e in entries)}" for kind, entries in of_kind.items())
    apart = " and ".join(entry.name for entry in of_kind["objective"] if not _is_by_environment(entry))
    return SandmaskError(
        f"{name!r} cannot be composed: {reason} Name at most one method of each kind; {apart} do not compose with a "
        f"rule. {lists[0].upper()}{lists[1:]}."
    )
