"""A trained run, loaded from its folder and ready to predict."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Algorithm, State
from sandmask.errors import SandmaskError
from sandmask.networks.batch_norm import RUNNING
from sandmask.records import AVERAGES, RunRecord, read_runs
from sandmask.records._archive import ARCHIVE_SUFFIX
from sandmask.registry import closest
from sandmask.selection import ADAPTATIONS
from sandmask.training.checkpoint import MODELS_SUFFIX, load_checked, save_tree
from sandmask.training.folder import MODEL, RECORDS, RunFolder
from sandmask.training.hub import PREFIX, fetch, push_to_hub, save_for_hub
from sandmask.training.keeping import StackModels, find_model
from sandmask.training.model_file import (
    ModelInfo,
    build_algorithm,
    constants_of,
    load_info,
    model_tree,
    set_constants,
    state_of,
)
from sandmask.training.precision import choose_device, temporary_precision

BATCH_SIZE = 256


class TrainedRun:
    """A finished run: its spec, its record and its model. Predictions need neither data nor pretrained weights.

    `spec` is the spec of the run. `classes` are the names of the classes, in the order of the probabilities.
    `environments` are the names of the dataset's environments, held-out ones included. `input_shape` is the shape of
    one example as the network takes it.

    `predict`, `logits` and `classify` take a batch of examples:

    - a float tensor or array `[N, *input_shape]` of preprocessed inputs;
    - for models trained on images: a list of image files, PIL images, uint8 arrays `[height, width, 3]` or
      uint8 tensors `[3, height, width]`, of any size. They are resized and normalized as in evaluation;
    - for models trained on arrays of pixels (the MNIST sets): uint8 arrays `[N, *input_shape]`.

    They compute the same as the evaluation during training, in the precision of the run, and return tensors on its
    device. A prediction depends on its example alone, except for ARM and MTL (`uses_context`). These methods treat all
    examples of one call as a batch from one environment; the evaluation during training uses batches of 64 examples.
    """

    def __init__(
        self,
        path: Path,
        info: ModelInfo,
        algorithm: Algorithm,
        state: State,
        device: torch.device,
        models: Path | None = None,
    ) -> None:
        self.path, self.info, self.device = path, info, device
        self.spec, self.classes, self.environments = info.spec, info.classes, info.environments
        self.input_shape = info.input_shape
        self._algorithm, self._state = algorithm, state
        self._models = models  # the file with models of many runs from which this run was loaded, if any

    @property
    def name(self) -> str:
        """The name of the files without suffix: "model" or, from a sweep, the id of the run; with "-sma" for SMA."""
        stem = "model" if self._models is None else self.spec.id
        return stem if self.info.average is None else f"{stem}-{self.info.average}"

    @property
    def uses_context(self) -> bool:
        """Whether the prediction for an example depends on the other examples of its batch."""
        return self._algorithm.uses_context

    def save_model(self, path: Path) -> None:
        """Write the model to a separate file, which `load_run` can load.

        :param path: the file to write.
        """
        save_tree(path, model_tree(self._algorithm, self._state), self.info.to_json())

    def save_pretrained(self, folder: str | os.PathLike[str], *, runs: Sequence[RunRecord] = ()) -> Path:
        """Write config.json, model.safetensors and a model card to a folder: the layout of the Hugging Face Hub.

        :param folder: the folder to write, which `load_run` can load.
        :param runs: records of the sweep that the run is part of, for the error over trials in the model card.
        """
        return save_for_hub(self, folder, runs=runs)

    def push_to_hub(self, repository: str, *, runs: Sequence[RunRecord] = (), private: bool = False) -> str:
        """Upload the model to the Hugging Face Hub; return its address.

        :param repository: its name there, such as "me/my-model".
        :param runs: records of the sweep that the run is part of, for the error over trials in the model card.
        :param private: whether a new repository is private.
        """
        return push_to_hub(self, repository, runs=runs, private=private)

    def record(self) -> RunRecord:
        """The run's evaluations."""
        if self._models is not None:
            archive = self._models.with_name(self._models.name.removesuffix(MODELS_SUFFIX) + ARCHIVE_SUFFIX)
            for run in read_runs(archive) if archive.exists() else ():
                if run.spec.id == self.spec.id:
                    return run
            raise SandmaskError(f"There is no record of run {self.spec.id} in {archive}.")
        if not (self.path / RECORDS).exists():
            raise SandmaskError(f"There is no {RECORDS} in the folder of the model, {self.path}.")
        record = RunFolder(self.path).record()
        if record.spec != self.spec:
            raise SandmaskError(f"{self.path / RECORDS} and the model in the same folder are from different runs.")
        return record

    def preprocess(self, x: Any) -> Tensor:
        """Return preprocessed examples `[N, *input_shape]`, the input of `module` and of exported models."""
        return self.info.preprocessing(x, self.device)

    @torch.no_grad()
    def logits(self, x: Any, batch_size: int = BATCH_SIZE) -> Tensor:
        """Return the network's outputs `[N, classes]` in float32, computed for `batch_size` examples at a time."""
        with temporary_precision(self.spec.precision):
            parts = [self._algorithm.predict(self._state, part) for part in self._batches(x, batch_size)]
        return torch.cat(parts) if parts else torch.empty(0, len(self.classes), device=self.device)

    def predict(self, x: Any, batch_size: int = BATCH_SIZE) -> Tensor:
        """Return the probabilities `[N, classes]`: the softmax of the logits."""
        return self.logits(x, batch_size).softmax(-1)

    def classify(self, x: Any, batch_size: int = BATCH_SIZE) -> list[str]:
        """Return the name of the most likely class of each example."""
        return [self.classes[number] for number in self.logits(x, batch_size).argmax(-1).tolist()]

    def module(self) -> nn.Module:
        """Return the model as an ordinary module in evaluation mode, `[N, *input_shape]` -> logits `[N, classes]`.

        It has a copy of the weights on the device of the run, and computes in float32 for every precision of the run.
        Its submodules are `featurizer` and `classifier`. For ADRMX, ARM, MTL and URM, its parameter is a flat vector.
        """
        spec = replace(self.spec, precision="fp32")
        algorithm = build_algorithm(spec, self.info, weights="none", dropout=False)
        set_constants(algorithm, constants_of(self._algorithm))
        return as_module(algorithm, self._state).to(self.device)

    def __repr__(self) -> str:
        spec = self.spec
        return f"TrainedRun({spec.algorithm} on {spec.dataset}, {len(self.classes)} classes, {str(self.path)!r})"

    def _batches(self, x: Any, batch_size: int) -> Iterator[Tensor]:
        """Yield preprocessed batches. Files are read batch by batch, so that there may be any number of files."""
        if batch_size < 1:
            raise SandmaskError(f"`batch_size` should be at least 1. Found `batch_size` = {batch_size}.")
        sliceable = isinstance(x, list | tuple | np.ndarray | Tensor) and getattr(x, "ndim", 1) > 0
        if self.uses_context or not sliceable:
            x = self.preprocess(x)
        step = len(x) if self.uses_context else batch_size
        for begin in range(0, len(x), step or 1):
            yield self.preprocess(x[begin : begin + step])


def load_run(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    run: str | None = None,
    average: str | None = None,
) -> TrainedRun:
    """Load a trained run from its folder, from its model file, or from a sweep that kept models.

    Folders and files can be moved, copied and renamed. A model file is sufficient for predictions. Register your own
    algorithm before you load its runs (see `sandmask.plugins`).

    :param path: folder of a run, its model.safetensors, the folder of a sweep, or "hf:" and the name of a model on the
        Hugging Face Hub.
    :param device: where to load the model.
    :param run: id of the run, or the beginning of the id, if `path` is a sweep.
    :param average: averaged weights that the run kept: "sma", "ema" or "swad".
    :return: the run.
    """
    where = choose_device(device)
    path = fetch(os.fspath(path)) if os.fspath(path).startswith(PREFIX) else Path(path)
    if _holds_many(path):
        return _load_kept(path, where, run, average)
    model = path if path.is_file() else path / (MODEL if average is None else f"model-{average}.safetensors")
    if not model.is_file():
        raise SandmaskError(_why_no_model(path, average))
    info = _read_info(model)
    if average is not None and info.average != average:
        held = "weights without averaging" if info.average is None else f"the average {info.average!r}"
        raise SandmaskError(f"{model} holds {held}, not {average!r}. Give the folder of the run: {model.parent}")
    if info.status != "done":
        raise SandmaskError(_diverged(path))
    if run is not None and not info.spec.id.startswith(run):
        raise SandmaskError(f"{path} holds the run {info.spec.id}, not {run!r}.")
    algorithm = _algorithm_of(info, path, where)
    state = state_of(model, load_checked(model)[1], algorithm, where)
    return TrainedRun(model.parent, info, algorithm, state, where)


def _holds_many(path: Path) -> bool:
    """Whether a path is the folder of a sweep, or one of its files of models."""
    if path.is_file():
        return path.name.endswith(MODELS_SUFFIX)
    return not (path / MODEL).exists() and not (path / RECORDS).exists() and (path / "sweep.toml").exists()


def _load_kept(path: Path, device: torch.device, run: str | None, average: str | None) -> TrainedRun:
    model = find_model(path, run, average)
    models = StackModels(model.file)
    info = models.info(model)
    algorithm = _algorithm_of(info, path, device)
    return TrainedRun(model.file.parent, info, algorithm, models.state(model, algorithm, device), device, model.file)


def _algorithm_of(info: ModelInfo, path: Path, device: torch.device) -> Algorithm:
    spec = info.spec
    if spec.algorithm not in ALGORITHMS:
        raise SandmaskError(
            f"The run in {path} was trained with {spec.algorithm!r}, which is not registered here. Import the "
            "module that registers it, or name it with --plugin FILE."
        )
    return build_algorithm(spec, info, weights="none", dropout=False).to(device)


def _read_info(model: Path) -> ModelInfo:
    try:
        info = load_info(model)
    except SandmaskError as error:
        if isinstance(error.__cause__, SafetensorError):  # not a safetensors file
            raise SandmaskError(f"{model} cannot be read as a model file: {error.__cause__}.") from error
        raise
    # In files of earlier versions, only the file name shows which average they hold.
    named = [average for average in AVERAGES if model.name == RunFolder(model.parent).average_path(average).name]
    return replace(info, average=named[0]) if info.average is None and named else info


def _why_no_model(path: Path, average: str | None) -> str:
    """Why there is no model at a path, and what to do about it."""
    if average is not None and average not in AVERAGES:
        return f"Unknown average {average!r}. {closest(average, list(AVERAGES))}"
    if average is not None and (path / MODEL).is_file():
        return f"The run in {path} kept no average {average!r}. Train it with --average {average}."
    if not path.is_dir():
        return f"There is no folder or file {path}. Give the folder of a run, or the model file in it."
    if not (path / RECORDS).is_file():
        return f"{path} is not the folder of a run: it has neither {MODEL} nor {RECORDS}."
    runs = read_runs(path / RECORDS)
    if len(runs) != 1:
        return f"{path} holds records of {len(runs)} runs and no model. Train one of these runs with `sandmask train`."
    if runs[0].status == "diverged":
        return _diverged(path)
    if (kind := runs[0].spec.options.get("soup")) in ("ensemble", *ADAPTATIONS):
        what = "an ensemble" if kind == "ensemble" else f"a model adapted by {ADAPTATIONS[kind]}"
        return f"{path} is {what}, which has no model file, only a record. Load a member, or a uniform or greedy soup."
    if runs[0].status == "done":
        return f"{path} has no {MODEL}, although its run is finished. Rerun the same command to make it again."
    done = int(runs[0].steps[-1]) + 1 if len(runs[0].steps) else 0
    return (
        f"The run in {path} is not finished: {done} of {runs[0].spec.steps} steps are recorded. Rerun the same "
        "`sandmask train` command to continue."
    )


def _diverged(path: Path) -> str:
    return f"The run in {path} diverged: its weights contain NaN or inf. Train it again with a smaller learning rate."


def as_module(algorithm: Algorithm, state: State) -> nn.Module:
    """A module with the weights of a state: featurizer and classifier, or a `Predictor` for other methods."""
    if algorithm.is_network:
        module = _plain_module(algorithm)
        values = {**algorithm.network.constants, **algorithm.network.named(state["params"])}
        places = dict(chain(module.named_parameters(), module.named_buffers()))
        if {name: value.shape for name, value in places.items()} == {k: v.shape for k, v in values.items()}:
            with torch.no_grad():
                for name, place in places.items():
                    place.copy_(values[name])
                    place.requires_grad_(place.requires_grad and not name.endswith(RUNNING))
            return module.eval()
    return Predictor(algorithm, state).eval()


def _plain_module(algorithm: Algorithm) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):  # the random initial weights will be replaced
        featurizer = algorithm.problem.featurizer()
        classifier = nn.Linear(featurizer.n_features, algorithm.problem.n_classes)
    return nn.Sequential(OrderedDict(featurizer=featurizer, classifier=classifier))


class Predictor(nn.Module):
    """An algorithm's `predict` as a module. Its parameter is the flat vector; the rest of the state are buffers."""

    params: nn.Parameter

    def __init__(self, algorithm: Algorithm, state: State) -> None:
        super().__init__()
        self._algorithm = algorithm
        self.params = nn.Parameter(state["params"].clone())
        rest = {name: value for name, value in state.items() if name != "params"}
        leaves, self._structure = pytree.tree_flatten((rest, constants_of(algorithm)))
        for number, leaf in enumerate(leaves):
            self.register_buffer(f"state_{number}", leaf.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch, which is treated as a batch from one environment."""
        rest, constants = pytree.tree_unflatten(list(self.buffers()), self._structure)
        set_constants(self._algorithm, constants)
        return self._algorithm.predict({**rest, "params": self.params}, x)
