"""What a dataset is: labelled examples of several environments, numbered through from first to last."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sandmask.registry import Registry

HparamScope = Literal["spirals", "mnist", "image"]


class Dataset(ABC):
    """Examples 0..N-1; environment e holds the examples bounds[e] <= i < bounds[e + 1]."""

    name: str
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    labels: Tensor  # [N] int64
    bounds: tuple[int, ...]

    @abstractmethod
    def inputs(self, indices: Tensor) -> Tensor:
        """The examples with these numbers (any shape), ready for a network: [*indices.shape, *input_shape]."""

    @abstractmethod
    def to(self, device: torch.device) -> "Dataset":
        """The same dataset, whose `inputs` and `labels` arrive on `device`."""


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset as listed: what it is, how to load it, and the paper's protocol for it."""

    name: str
    description: str
    environments: tuple[str, ...]  # column names of the paper's tables; empty when they come from a folder
    load: Callable[[Path | None], Dataset]  # given the data folder
    network: str  # "mlp", "mnist-convnet" or a timm name
    scope: HparamScope  # which hyperparameter ranges apply
    steps: int = 5001
    checkpoint_every: int = 300
    report_envs: tuple[int, ...] | None = None  # held-out environments that the tables report; None is all


DATASETS: Registry[DatasetEntry] = Registry("dataset")
