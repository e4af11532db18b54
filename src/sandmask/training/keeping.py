"""The weights that a stack keeps of its runs, and their file, `<stack>.models.safetensors`.

Weights are kept from the best evaluation of each run, or from the end. The best evaluation is the one that
training-domain selection chooses: it has the highest mean "out" accuracy over the training environments, and of several
such evaluations it is the first. Averaged weights have their own best evaluation; SWAD's average is kept at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._files import files_below
from sandmask._text import in_shell
from sandmask.algorithms import Algorithm, State
from sandmask.errors import SandmaskError
from sandmask.functional import AdamState
from sandmask.records import RunRecord, RunSpec, averaged_spec
from sandmask.records._types import under_prefix
from sandmask.selection import mean_over_environments
from sandmask.training.averaging import average_metric, averaged_state, where
from sandmask.training.checkpoint import (
    MODELS_SUFFIX,
    DamagedFileError,
    damaged,
    load_checked,
    load_metadata,
    save_tree,
)
from sandmask.training.model_file import ModelInfo, model_tree, state_of
from sandmask.training.preprocessing import Preprocessing
from sandmask.training.stack import Stack, without_averages

KEPT = ("none", "best", "last")
WEIGHTS = "weights"  # the kind of weights that are not averaged; other kinds are names of averages


class Keeper:
    """Holds the states to keep while a stack trains, of each run and for each kind of weights.

    `values` are the best accuracies so far. `steps` are the steps of the states, or -1 for a run that diverged before
    its first evaluation. All tensors are part of the checkpoint.
    """

    def __init__(self, stack: Stack, how: str) -> None:
        self.stack = stack
        kinds = (WEIGHTS, *(name for name in stack.averages if name != "swad")) if how == "best" else ()
        self.values = {kind: torch.full((stack.n_runs,), -torch.inf, dtype=torch.float64) for kind in kinds}
        self.steps = {kind: torch.full((stack.n_runs,), -1) for kind in kinds}
        self.states: dict[str, State] = {}

    @property
    def keeps_best(self) -> bool:
        """Whether the states of the best evaluations are kept, and not only the last states."""
        return bool(self.values)

    def start(self, state: State) -> None:
        """Allocate states of these shapes."""
        used = _used(without_averages(state)[0])
        self.states = {kind: pytree.tree_map(torch.clone, used) for kind in self.values}

    def tree(self) -> dict[str, Any]:
        """The tensors, for a checkpoint."""
        return {"values": self.values, "steps": self.steps, "states": self.states}

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore the tensors of a checkpoint."""
        self.values = {kind: values.cpu() for kind, values in tree["values"].items()}
        self.steps = {kind: steps.cpu() for kind, steps in tree["steps"].items()}
        self.states = tree["states"]

    def update(
        self,
        step: int,
        state: State,
        outside: NDArray[np.float64],
        metrics: dict[str, Tensor],
        diverged_at: Sequence[int],
    ) -> None:
        """Keep the weights of the runs for which this evaluation is the best so far. Waits for the device.

        `outside` are the "out" accuracies of the weights, [K, environments]. The accuracies of averages are in
        `metrics`.
        """
        plain, averages = without_averages(state)
        n_envs = outside.shape[1]
        for kind in self.values:
            accuracy = (
                outside if kind == WEIGHTS else metrics[average_metric(kind)][:, n_envs : 2 * n_envs].cpu().numpy()
            )
            means = map(training_mean, accuracy, self.stack.specs)
            values = torch.tensor(list(means), dtype=torch.float64)
            better = (values > self.values[kind]) & (torch.tensor(diverged_at) < 0)
            if not better.any():
                continue
            self.values[kind] = torch.where(better, values, self.values[kind])
            self.steps[kind] = torch.where(better, step, self.steps[kind])
            now = _used(plain if kind == WEIGHTS else averaged_state(plain, averages[kind]))
            mask = better.to(self.stack.device)
            self.states[kind] = pytree.tree_map(lambda new, old: where(mask, new, old), now, self.states[kind])  # noqa: B023

    def final(self, state: State, diverged_at: Sequence[int]) -> tuple[dict[str, State], dict[str, list[int]]]:
        """After the last step, return the states to keep and their steps, for each kind of weights."""
        plain, averages = without_averages(state)
        last = self.stack.specs[0].steps - 1
        last_steps = [-1 if at >= 0 else last for at in diverged_at]
        states: dict[str, State] = dict(self.states)
        steps: dict[str, list[int]] = {kind: found.tolist() for kind, found in self.steps.items()}
        kinds = {WEIGHTS: plain, **{name: averaged_state(plain, average) for name, average in averages.items()}}
        for kind, now in kinds.items():
            if kind not in states:
                states[kind], steps[kind] = _used(now), last_steps
        return states, steps


def training_mean(accuracy: NDArray[np.float64], spec: RunSpec) -> float:
    """The mean of accuracies [environments] over the training environments of a run, as in selection rules."""
    return float(mean_over_environments(np.delete(accuracy, spec.test_envs)[None])[0])


def _used(state: State) -> State:
    """The entries of a state that a prediction may need."""
    return {k: v for k, v in state.items() if k != "step" and not isinstance(v, AdamState)}


@dataclass(frozen=True)
class KeptModel:
    """One of the models in a file: the weights of a run after one of its steps, or an average of them."""

    file: Path
    place: int  # in the file
    spec: RunSpec
    kind: str  # "weights", or the name of an average
    step: int

    @property
    def average(self) -> str | None:
        """The name of the average; None for the weights themselves."""
        return None if self.kind == WEIGHTS else self.kind

    @property
    def shown_id(self) -> str:
        """The id in reports, where an average of a run has its own row."""
        return averaged_spec(self.spec, self.average).id


def save_models(
    path: Path, stack: Stack, states: dict[str, State], steps: dict[str, list[int]], records: Sequence[RunRecord]
) -> None:
    """Write the weights that were kept of a stack. The file is written atomically."""
    trees = {kind: _stacked(stack.algorithm, state, stack.n_runs) for kind, state in states.items()}
    tree = {"constants": model_tree(stack.algorithm, stack.algorithm.init(0))["constants"], "models": trees}
    dataset = stack.dataset
    metadata = {
        "runs": [spec.to_json() for spec in stack.specs],
        "statuses": [record.status for record in records],
        "steps": steps,
        "environments": list(dataset.environments),
        "classes": list(dataset.classes),
        "preprocessing": vars(Preprocessing.of(dataset)),
    }
    save_tree(path, tree, metadata)


def _stacked(algorithm: Algorithm, state: State, n_runs: int) -> dict[str, Any]:
    """The parameters by name and the other entries of the state, each [K, ...]."""

    def one(k: int) -> dict[str, Any]:
        tree = model_tree(algorithm, pytree.tree_map(lambda t: t[k].cpu(), state))
        return {"params": tree["params"], "extra": tree["extra"]}

    each = [one(k) for k in range(n_runs)]
    stacked: dict[str, Any] = pytree.tree_map(lambda *leaves: torch.stack(leaves), *each)
    return stacked


def kept_models(folder: Path) -> Iterator[KeptModel]:
    """Yield the models in a file, or in all such files below a folder.

    :param folder: file or folder.
    """
    files = [folder] if folder.is_file() else files_below(folder, MODELS_SUFFIX)
    for file in (file for file in files if not file.name.startswith(".")):
        metadata = load_metadata(file)
        if not {"runs", "steps"} <= metadata.keys():
            raise DamagedFileError(f"{file} is not a file of a sweep's models. Move it elsewhere.")
        try:
            specs = [RunSpec.from_json(spec) for spec in metadata["runs"]]
            yield from [
                KeptModel(file, place, spec, kind, step)
                for kind, steps in metadata["steps"].items()
                for place, (spec, step) in enumerate(zip(specs, steps, strict=True))
                if step >= 0
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # the checksum of metadata is not verified
            raise damaged(file) from error


def find_model(folder: Path, run: str | None, average: str | None) -> KeptModel:
    """Find the model of a run by the beginning of its id in the sweep or in a report. None finds the only model."""
    every = list(kept_models(folder))
    of_kind = [model for model in every if model.average == average]
    found = [model for model in of_kind if run is None or model.spec.id.startswith(run)]
    if run is not None and average is None:
        found += [model for model in every if model.shown_id.startswith(run) and model not in found]
    if len(found) == 1:
        return found[0]
    if not every:
        raise SandmaskError(f"{folder} holds no models. Train the sweep with --keep-models best, or last.")
    averages = sorted({model.average for model in every if model.average is not None})
    if average is not None and not of_kind:
        kinds = ", ".join(averages) or "none"
        raise SandmaskError(f"{folder} holds no models of the average {average!r}. It has these averages: {kinds}.")
    which = f"{len(found) or 'no'} models of run {run!r}"
    if run is None:
        which = f"{len(every)} models" if average is None else f"{len(of_kind)} models of the average {average!r}"
    choose = "Name one with --run ID"
    if average is None and averages:
        choose += f", or averaged weights with --run ID --average {' or '.join(averages)}"
    raise SandmaskError(f"{folder} holds {which}. {choose}; `sandmask sweep models {in_shell(folder)}` lists them.")


class StackModels:
    """A file of models, read into memory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.metadata, self._leaves = load_checked(file)

    def info(self, model: KeptModel) -> ModelInfo:
        """The metadata of the model, as in a file of a single model."""
        status = "done"  # the weights are finite, although the run may have diverged later
        own = {"spec": model.spec.to_json(), "status": status, "step": model.step, "average": model.average}
        return ModelInfo.from_json({**self.metadata, **own})

    def state(self, model: KeptModel, algorithm: Algorithm, device: torch.device) -> State:
        """The state for predictions. Sets the constants of the algorithm's networks."""
        own = {name: leaf for name, leaf in self._leaves.items() if name.startswith("constants.")}
        own |= {name: leaf[model.place] for name, leaf in under_prefix(f"models.{model.kind}.", self._leaves).items()}
        return state_of(self.file, own, algorithm, device)
