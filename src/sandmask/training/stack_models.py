"""The kept models of a stack's runs, in one file: `<stack>.models.safetensors`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask._text import in_shell
from sandmask.algorithms import Algorithm, State
from sandmask.errors import SandmaskError
from sandmask.records import RunRecord, RunSpec, Status, averaged_spec
from sandmask.training.checkpoint import load_checked, load_metadata, save_tree, tree_word
from sandmask.training.keeping import WEIGHTS
from sandmask.training.model_file import ModelInfo, model_tree, set_constants
from sandmask.training.preprocessing import Preprocessing
from sandmask.training.stack import Stack

MODELS_SUFFIX = ".models.safetensors"


@dataclass(frozen=True)
class KeptModel:
    """A model in a file of many: of one run, of its weights or of an average of them, after one of its steps."""

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
        """The id that reports have for it: an average of a run is a row of its own there."""
        return averaged_spec(self.spec, self.average).id


def save_models(
    path: Path, stack: Stack, states: dict[str, State], steps: dict[str, list[int]], records: Sequence[RunRecord]
) -> None:
    """Write what was kept of a stack; the file appears complete, or not at all."""
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
    """Parameters by name and other entries of the state, [K, ...] each."""

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
    files = [folder] if folder.is_file() else sorted(folder.rglob(f"[!.]*{MODELS_SUFFIX}"))
    for file in files:
        metadata = load_metadata(file)
        for kind, steps in metadata["steps"].items():
            for place, (spec, step) in enumerate(zip(metadata["runs"], steps, strict=True)):
                if step >= 0:
                    yield KeptModel(file, place, RunSpec.from_json(spec), kind, step)


def find_model(folder: Path, run: str | None, average: str | None) -> KeptModel:
    """The model of a run, by its id (or the beginning of it) in the sweep or in a report; of the only run, if there is
    one.
    """
    every = list(kept_models(folder))
    of_kind = [model for model in every if model.average == average]
    found = [model for model in of_kind if run is None or model.spec.id.startswith(run)]
    if run is not None and average is None:
        found += [model for model in every if model.shown_id.startswith(run) and model not in found]
    if len(found) == 1:
        return found[0]
    if not every:
        raise SandmaskError(f"{folder} holds no models. Train the sweep with --keep-models best, or last.")
    if not of_kind:
        kinds = ", ".join(sorted({model.kind for model in every if model.kind != WEIGHTS})) or "none"
        raise SandmaskError(f"{folder} holds no models of the average {average!r}. Averages there: {kinds}.")
    which = f"{len(found)} models" if run is None else f"{len(found) or 'no'} models of run {run!r}"
    raise SandmaskError(
        f"{folder} holds {which}. Name one with --run ID; `sandmask sweep models {in_shell(folder)}` lists them."
    )


class StackModels:
    """A file of models, read into memory."""

    def __init__(self, file: Path) -> None:
        self.metadata, self._leaves = load_checked(file)

    def info(self, model: KeptModel) -> ModelInfo:
        """What a model file of its own would say of the model."""
        status: Status = "done"  # the weights are finite, though the run may have diverged later
        return ModelInfo(
            spec=model.spec,
            status=status,
            environments=tuple(self.metadata["environments"]),
            classes=tuple(self.metadata["classes"]),
            preprocessing=Preprocessing.from_json(self.metadata["preprocessing"]),
        )

    def state(self, model: KeptModel, algorithm: Algorithm, device: torch.device) -> State:
        """The state to predict with; the algorithm's networks get their constants."""
        like = model_tree(algorithm, algorithm.init(0))
        set_constants(algorithm, self._read("constants", like["constants"], None, device))
        own = {name: like[name] for name in ("params", "extra")}
        tree = self._read(f"models.{model.kind}", own, model.place, device)
        return {**tree["extra"], "params": algorithm.network.flatten(tree["params"])}

    def _read(self, prefix: str, like: Any, place: int | None, device: torch.device) -> Any:
        """A tree of the structure of `like`: whole, or the part of one run."""

        def leaf(path: Any, want: Tensor) -> Tensor:
            name = ".".join([prefix, *map(tree_word, path)])
            value = self._leaves.get(name)
            found = value if value is None or place is None else value[place]
            if found is None or found.shape != want.shape:
                raise SandmaskError(f"A file of models does not fit this version of sandmask: {name} differs.")
            return found.to(device)

        return pytree.tree_map_with_path(leaf, like)
