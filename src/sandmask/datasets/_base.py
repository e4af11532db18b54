"""The base class of datasets: labelled examples of several environments, numbered from first to last."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sandmask.hparams import Scope
from sandmask.hparams._hparam import scope_name
from sandmask.registry import Registry

HparamScope = Scope


class Dataset(ABC):
    """Examples 0..N-1; environment e holds the examples bounds[e] <= i < bounds[e + 1].

    Your own dataset needs the attributes, `inputs` and `to`; the rest has defaults that suit tensors in memory.
    """

    name: str
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    labels: Tensor  # [N] int64
    bounds: tuple[int, ...]
    # How examples are split, [N]: 0 is "in", 1 is "out", -1 at random by the trial's seed; None is at random for all.
    splits: Tensor | None = None
    domains: tuple[str, ...] = ()  # longer names of the environments, such as their folders; empty when there are none

    @property
    def resident(self) -> bool:
        """Whether all of it is on the device, so that a captured program can read from it."""
        return False

    @abstractmethod
    def inputs(self, indices: Tensor) -> Tensor:
        """The examples with these numbers (any shape), for a network: [*indices.shape, *input_shape]."""

    @abstractmethod
    def to(self, device: torch.device) -> "Dataset":
        """The same dataset, whose `inputs` and `labels` arrive on `device`."""

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:  # noqa: ARG002 - most sets augment nothing
        """The examples as a training step sees them: augmented, with randomness from `key` alone.

        `key` is one key, or one for each place of the first dimensions of `indices` (a stack of runs).
        """
        return self.inputs(indices)

    def batches(self, indices: Iterable[Tensor], depth: int = 4) -> Iterator[Tensor]:  # noqa: ARG002
        """`inputs` of each element in turn; sets that decode read up to `depth` elements ahead."""
        for some in indices:
            yield self.inputs(some)

    def training_batches(
        self,
        requests: Iterable[tuple[Tensor, Tensor]],
        depth: int = 4,  # noqa: ARG002
    ) -> Iterator[Tensor]:
        """`training_inputs` of each (indices, key) in turn; sets that decode read up to `depth` ahead."""
        for indices, key in requests:
            yield self.training_inputs(indices, key)


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset as listed: what it is, how to load it, and the paper's protocol for it."""

    name: str
    description: str
    environments: tuple[str, ...]  # column names of the paper's tables
    load: Callable[..., Dataset]  # given the data folder (or None), and the dataset's own options by keyword
    network: str  # a registered one, such as "mlp", or a timm name
    scope: HparamScope  # which hyperparameter ranges apply
    steps: int = 5001
    recipe_steps: int | None = None  # steps of `--space recipe`; None is as many
    checkpoint_every: int = 300
    report_envs: tuple[int, ...] | None = None  # held-out environments that the tables report; None is all
    n_classes: int | None = None  # None when it comes from a folder
    input_shape: tuple[int, ...] | None = None
    domains: tuple[str, ...] = ()  # folder names of the environments
    # Of a generated dataset: the entry of data generated with other parameters, such as "Spirals:seed=1".
    variant: Callable[[dict[str, str]], "DatasetEntry"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", scope_name(self.scope))

    def steps_in(self, space: str) -> int:
        """The number of training steps that goes with a hyperparameter space."""
        return self.recipe_steps if space == "recipe" and self.recipe_steps is not None else self.steps


DATASETS: Registry[DatasetEntry] = Registry("dataset")
