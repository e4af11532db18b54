"""Build algorithms from specs, and write and read model files: weights by name, constants of networks, and metadata.

A model file is sufficient for predictions. Neither the dataset nor pretrained weights are needed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Algorithm, Problem, State
from sandmask.datasets import Dataset
from sandmask.errors import SandmaskError
from sandmask.functional import AdamState, FlatModule, Params
from sandmask.networks import Network, build_featurizer
from sandmask.records import RunSpec, Status
from sandmask.training.checkpoint import as_tree, load_metadata, save_tree
from sandmask.training.precision import compute_dtype, temporary_precision
from sandmask.training.preprocessing import Preprocessing
from sandmask.training.specs import SIZE_HPARAMS


@dataclass(frozen=True)
class ModelInfo:
    """The metadata of a model file."""

    spec: RunSpec
    status: Status
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    step: int | None = None  # step of the weights; None is the last step
    average: str | None = None  # the name of the average, if the weights are averaged

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one preprocessed example."""
        return self.preprocessing.input_shape

    def to_json(self) -> dict[str, Any]:
        """The metadata as plain JSON values."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {**known, "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelInfo":
        """The inverse of `to_json`."""
        return cls(
            spec=RunSpec.from_json(data["spec"]),
            status=data["status"],
            environments=tuple(data["environments"]),
            classes=tuple(data["classes"]),
            preprocessing=Preprocessing.from_json(data["preprocessing"]),
            step=data.get("step"),
            average=data.get("average"),
        )


def build_algorithm(spec: RunSpec, shapes: Dataset | ModelInfo, *, weights: str | None, dropout: bool) -> Algorithm:
    """Build the algorithm of a spec, for the shapes of a dataset or of a model."""
    sizes = {name: int(spec.hparams[name]) for name in SIZE_HPARAMS if name in spec.hparams}
    featurizer = build_featurizer(spec.network, shapes.input_shape, sizes, weights)
    problem = Problem(
        featurizer=featurizer,
        n_envs=len(shapes.environments) - len(spec.test_envs),
        n_classes=len(shapes.classes),
        input_shape=shapes.input_shape,
        sizes=sizes,
        dropout=dropout,
        dtype=compute_dtype(spec.precision),
    )
    with temporary_precision(spec.precision):  # the kernels of a network depend on it
        built = ALGORITHMS[spec.algorithm].build(problem)
    if not isinstance(built, Algorithm):
        raise SandmaskError(f"`build` of {spec.algorithm} should return an `Algorithm`. Found {type(built).__name__}.")
    return built


def save_model(
    path: Path,
    algorithm: Algorithm,
    state: State,
    spec: RunSpec,
    status: Status,
    dataset: Dataset,
    average: str | None = None,
) -> None:
    """Write the model of one run that was trained on `dataset`. `average` is the name of the average, if any."""
    preprocessing = Preprocessing.of(dataset)
    info = ModelInfo(spec, status, dataset.environments, dataset.classes, preprocessing, average=average)
    save_tree(path, model_tree(algorithm, state), info.to_json())


def load_info(path: Path) -> ModelInfo:
    """The metadata of a model file."""
    data = load_metadata(path)
    try:
        return ModelInfo.from_json(data)
    except (KeyError, TypeError) as error:
        raise SandmaskError(
            f"{path} was written by another version of sandmask ({type(error).__name__}: {error}). Use that "
            "version, or delete the file and train the run again."
        ) from error


def state_of(path: Path, leaves: Mapping[str, Tensor], algorithm: Algorithm, device: torch.device) -> State:
    """The state that `predict` needs, from the tensors of a model file. Sets the constants of the networks."""
    tree = as_tree(path, leaves, model_tree(algorithm, algorithm.init(0)), device)
    set_constants(algorithm, tree["constants"])
    return {**tree["extra"], "params": algorithm.network.flatten(tree["params"])}


def model_tree(algorithm: Algorithm, state: State) -> dict[str, Any]:
    """The content of a model file: the parameters by name, the state without optimizers, and the networks' constants.

    Constants are the statistics of frozen batch-norm layers, which are not part of the state.
    """
    left_out = ("params", "step", *algorithm.training_only)
    extra = {k: v for k, v in state.items() if k not in left_out and not isinstance(v, AdamState)}
    # Copy, because buffers may share memory, which safetensors does not allow.
    constants = pytree.tree_map(torch.clone, constants_of(algorithm))
    return {"params": algorithm.network.named(state["params"]), "extra": extra, "constants": constants}


def constants_of(algorithm: Algorithm) -> dict[str, Params]:
    """The constants of an algorithm's networks."""
    return {name: part.constants for name, part in _networks(algorithm).items()}


def set_constants(algorithm: Algorithm, constants: dict[str, Params]) -> None:
    """Replace the constants of an algorithm's networks, and keep their dtypes."""
    for name, part in _networks(algorithm).items():
        own = part.constants
        part.constants = {k: value.to(own[k].dtype) for k, value in constants[name].items()}


def _networks(algorithm: Algorithm) -> dict[str, Network | FlatModule]:
    """The networks of an algorithm by attribute: the model, and other networks of the method."""
    return {name: part for name, part in vars(algorithm).items() if isinstance(part, Network | FlatModule)}
