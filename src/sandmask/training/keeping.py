"""The weights of runs that stay when a stack is done: at the best evaluation of each run, or at the end.

"best" is what training-domain selection takes: the highest mean "out" accuracy over the training environments, of ties
the first. An average of the weights is kept at its own best evaluation; SWAD's, which is one model, at the end.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask.algorithms import State
from sandmask.functional import AdamState
from sandmask.selection import mean_over_environments
from sandmask.training.averaging import average_metric, averaged_state
from sandmask.training.stack import Stack, without_averages

KEPT = ("none", "best", "last")
WEIGHTS = "weights"  # the kind of the weights themselves; other kinds are names of averages


class Keeper:
    """Follows the evaluations of a stack and holds what to keep of each kind of weights.

    Its tensors are part of the checkpoint. `steps` says after which step the weights of each run are from; -1 is for
    a run that has none, because it diverged before.
    """

    def __init__(self, stack: Stack, how: str) -> None:
        self.stack, self.how = stack, how
        kinds = (WEIGHTS, *(name for name in stack.averages if name != "swad")) if how == "best" else ()
        self.values = {kind: torch.full((stack.n_runs,), -torch.inf, dtype=torch.float64) for kind in kinds}
        self.steps = {kind: torch.full((stack.n_runs,), -1) for kind in kinds}
        self.states: dict[str, State] = {}

    def start(self, state: State) -> None:
        """Make room for the weights of this state's shapes."""
        used = _used(without_averages(state)[0])
        self.states = {kind: pytree.tree_map(torch.clone, used) for kind in self.values}

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint; empty where nothing is followed."""
        return {"values": self.values, "steps": self.steps, "states": self.states} if self.values else {}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.values = {kind: values.cpu() for kind, values in tree["values"].items()}
        self.steps = {kind: steps.cpu() for kind, steps in tree["steps"].items()}
        self.states = tree["states"]

    def look(
        self, step: int, state: State, outside: NDArray[np.float64], metrics: dict[str, Tensor], ends: Any
    ) -> None:
        """Take the weights of the runs for which this evaluation is the best so far; waits for the device.

        :param step: the step after which the stack is evaluated.
        :param state: the present state, with averages.
        :param outside: "out" accuracies of the weights, [K, environments].
        :param metrics: the evaluation's metrics, with those of averages.
        :param ends: the step at which each run diverged; -1 for none.
        """
        plain, averages = without_averages(state)
        n_envs = outside.shape[1]
        for kind in self.values:
            accuracy = (
                outside if kind == WEIGHTS else metrics[average_metric(kind)][:, n_envs : 2 * n_envs].cpu().numpy()
            )
            values = torch.tensor([self._value(k, accuracy[k]) for k in range(len(accuracy))], dtype=torch.float64)
            better = (values > self.values[kind]) & (torch.tensor(ends) < 0)
            if not better.any():
                continue
            self.values[kind] = torch.where(better, values, self.values[kind])
            self.steps[kind] = torch.where(better, step, self.steps[kind])
            now = _used(plain if kind == WEIGHTS else averaged_state(plain, averages[kind]))
            mask = better.to(self.stack.device)
            self.states[kind] = pytree.tree_map(lambda new, old: _where(mask, new, old), now, self.states[kind])  # noqa: B023

    def _value(self, run: int, accuracy: NDArray[np.float64]) -> float:
        held_out = self.stack.specs[run].test_envs
        training = [env for env in range(len(accuracy)) if env not in held_out]
        return float(mean_over_environments(accuracy[None, training])[0])

    def final(self, state: State, ends: list[int]) -> tuple[dict[str, State], dict[str, list[int]]]:
        """What is kept of each kind, with the steps, once the last step is taken."""
        plain, averages = without_averages(state)
        last = self.stack.specs[0].steps - 1
        whole = [-1 if end >= 0 else last for end in ends]
        states: dict[str, State] = dict(self.states)
        steps: dict[str, list[int]] = {kind: found.tolist() for kind, found in self.steps.items()}
        kinds = {WEIGHTS: plain, **{name: averaged_state(plain, average) for name, average in averages.items()}}
        for kind, now in kinds.items():
            if kind not in states:
                states[kind], steps[kind] = _used(now), whole
        return states, steps


def _used(state: State) -> State:
    """The entries of a state that a prediction may need."""
    return {k: v for k, v in state.items() if k != "step" and not isinstance(v, AdamState)}


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)
