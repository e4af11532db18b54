"""The base class and the registry of datasets, which have labelled examples of several environments."""

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sandmask._text import counted, printable
from sandmask.datasets._scan import LeftOut
from sandmask.errors import SandmaskError
from sandmask.hparams import Scope
from sandmask.hparams._hparam import scope_name
from sandmask.registry import Registry

HparamScope = Scope
MOST_CLASSES = 12  # largest number of classes whose counts an inventory lists
SHOWN_FILES = 3  # number of left-out files that an inventory names for each reason


class Dataset(ABC):
    """Base class of datasets. Environment e has the examples i of 0..N-1 with bounds[e] <= i < bounds[e + 1].

    A subclass defines the attributes that have no default, `inputs` and `to`. The defaults of all other members suit
    tensors in memory.
    """

    name: str
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    labels: Tensor  # [N] int64
    bounds: tuple[int, ...]
    # The split of each example, [N]: 0 is "in", 1 is "out", and -1 is one of both, drawn with the seed of the trial.
    # None means -1 for all examples.
    splits: Tensor | None = None
    domains: tuple[str, ...] = ()  # longer names of the environments, such as their folders; empty when there are none
    left_out: tuple[LeftOut, ...] = ()  # files that are not used, and why

    @property
    def resident(self) -> bool:
        """Whether all examples are on the device, so that a captured program can read them."""
        return False

    @abstractmethod
    def inputs(self, indices: Tensor) -> Tensor:
        """Return the inputs of the examples with these indices: [*indices.shape, *input_shape]."""

    @abstractmethod
    def to(self, device: torch.device) -> "Dataset":
        """Return the same dataset with `inputs` and `labels` on `device`."""

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:  # noqa: ARG002 - most sets augment nothing
        """Return inputs for a training step: augmented, with random numbers that depend only on `key`.

        `key` is a single key, or has one key for each position in the first dimensions of `indices` (a stack of runs).
        """
        return self.inputs(indices)

    def batches(self, indices: Iterable[Tensor], depth: int = 4) -> Iterator[Tensor]:  # noqa: ARG002
        """Yield `inputs` of each element in turn. Datasets of files read up to `depth` elements ahead."""
        for some in indices:
            yield self.inputs(some)

    def training_batches(
        self,
        requests: Iterable[tuple[Tensor, Tensor]],
        depth: int = 4,  # noqa: ARG002
    ) -> Iterator[Tensor]:
        """Yield `training_inputs` of each (indices, key) in turn. Datasets of files read up to `depth` ahead."""
        for indices, key in requests:
            yield self.training_inputs(indices, key)

    def read_batches(self, requests: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Any]:
        """Read ahead for training steps: yield what `prepare` needs for each (indices, key), both on the CPU.

        This is a tree of tensors on the device. Datasets for which reading takes much longer than augmentation yield
        what they have read, and augment it in `prepare`, which may be part of a captured program.
        """
        device = self.labels.device
        yield from self.training_batches((indices.to(device), key.to(device)) for indices, key in requests)

    def prepare(self, read: Any, shape: torch.Size, key: Tensor) -> Tensor:  # noqa: ARG002
        """Return the `training_inputs` of `shape` examples, given what `read_batches` yielded for them.

        `key` is on the device.
        """
        inputs: Tensor = read
        return inputs


@dataclass(frozen=True)
class DatasetEntry:
    """An entry of `DATASETS`: a description, the function that loads the dataset, and the protocol of the paper."""

    name: str
    description: str
    environments: tuple[str, ...]  # column names of the paper's tables
    load: Callable[..., Dataset]  # called with the data folder (or None), and the dataset's own options by keyword
    network: str  # a registered network, such as "mlp", or a timm name
    scope: HparamScope  # which hyperparameter ranges apply
    steps: int = 5001
    recipe_steps: int | None = None  # steps in `--space recipe`; None means `steps`
    checkpoint_every: int = 300
    report_envs: tuple[int, ...] | None = None  # held-out environments that tables report; None means all
    n_classes: int | None = None  # None if it depends on the files
    input_shape: tuple[int, ...] | None = None
    domains: tuple[str, ...] = ()  # folder names of the environments
    # For a generated dataset: returns the entry of data with other parameters, such as "Spirals:seed=1".
    variant: Callable[[dict[str, str]], "DatasetEntry"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", scope_name(self.scope))

    def steps_in(self, space: str) -> int:
        """The number of training steps that goes with a hyperparameter space."""
        return self.recipe_steps if space == "recipe" and self.recipe_steps is not None else self.steps


DATASETS: Registry[DatasetEntry] = Registry("dataset")


class TensorDataset(Dataset):
    """A dataset in memory, from a pair (inputs [n, ...], labels [n]) for each environment.

    Inputs of type uint8 are stored as such, and returned as floats in 0..1.
    """

    def __init__(
        self,
        name: str,
        environments: Sequence[str],
        classes: Sequence[str],
        parts: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        _check_parts(name, environments, classes, parts)
        self.name = name
        self.environments = tuple(environments)
        self.classes = tuple(classes)
        self.stored = torch.cat([inputs for inputs, _ in parts])
        self.labels = torch.cat([labels for _, labels in parts]).to(torch.int64)
        self.input_shape = tuple(self.stored.shape[1:])
        sizes = torch.tensor([0, *(len(labels) for _, labels in parts)])
        self.bounds = tuple(sizes.cumsum(0).tolist())

    @property
    def resident(self) -> bool:
        """True, because all examples are in one tensor."""
        return True

    def inputs(self, indices: Tensor) -> Tensor:
        """Return the inputs of the examples with these indices as float32: [*indices.shape, *input_shape]."""
        chosen = self.stored[indices]
        return chosen / 255.0 if chosen.dtype == torch.uint8 else chosen

    def to(self, device: torch.device) -> "TensorDataset":
        """Return a copy on `device`."""
        moved = copy.copy(self)
        moved.stored = self.stored.to(device)
        moved.labels = self.labels.to(device)
        return moved


def _check_parts(
    name: str, environments: Sequence[str], classes: Sequence[str], parts: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Raise an error unless names, inputs and labels fit together."""
    if len(environments) != len(parts) or not parts:
        raise SandmaskError(f"{name}: found {len(environments)} environment names for {len(parts)} environments.")
    if len(set(environments)) != len(environments):
        raise SandmaskError(f"{name}: two environments have the same name: {', '.join(map(repr, environments))}.")
    if len(set(classes)) != len(classes):
        raise SandmaskError(f"{name}: two classes have the same name: {', '.join(map(repr, classes))}.")
    for environment, (inputs, labels) in zip(environments, parts, strict=True):
        where = f"{name}, environment {environment!r}"
        for given in (inputs, labels):
            if not isinstance(given, Tensor):
                raise SandmaskError(f"{where}: inputs and labels should be tensors. Found {type(given).__name__}.")
        if len(inputs) != len(labels) or not len(labels):
            raise SandmaskError(
                f"{where}: found {len(inputs)} inputs and {len(labels)} labels. Give one label for each input, and at "
                "least one of each."
            )
        _check_inputs(where, inputs)
        if inputs.dtype != parts[0][0].dtype or inputs.shape[1:] != parts[0][0].shape[1:]:
            raise SandmaskError(
                f"{where}: inputs should be like those of {environments[0]!r}, {_form(parts[0][0])}. "
                f"Found {_form(inputs)}."
            )
        _check_labels(where, labels, len(classes))


def _check_inputs(where: str, inputs: Tensor) -> None:
    if inputs.dtype not in (torch.uint8, torch.float32):
        raise SandmaskError(f"{where}: inputs should be float32 or uint8. Found {inputs.dtype}.")
    if inputs.ndim < 2:
        raise SandmaskError(
            f"{where}: inputs should have the shape [n, ...]. Found {list(inputs.shape)}. If there is a single number "
            "for each example, use [n, 1]."
        )
    if not inputs.isfinite().all():
        raise SandmaskError(f"{where}: inputs contain NaN or inf.")


def _check_labels(where: str, labels: Tensor, n_classes: int) -> None:
    whole = labels.to(torch.int64)
    if labels.ndim != 1 or not torch.equal(whole.to(labels.dtype), labels):
        raise SandmaskError(f"{where}: labels should be whole numbers, one for each input: a tensor of shape [n].")
    if whole.min() < 0 or whole.max() >= n_classes:
        raise SandmaskError(f"{where}: labels should be in 0..{n_classes - 1} for {n_classes} classes.")


def _form(inputs: Tensor) -> str:
    return f"{inputs.dtype} of shape {list(inputs.shape[1:])}"


@dataclass(frozen=True)
class Inventory:
    """The number of examples of each environment and class, and the files that are not used."""

    name: str
    environments: tuple[str, ...]
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [environments][classes]
    left_out: tuple[LeftOut, ...]

    def lines(self) -> list[str]:
        """Return the inventory as text: a summary, a line per environment and a line per reason to leave out files."""
        total = sum(map(sum, self.counts))
        sizes = f"{counted(len(self.environments), 'environment')}, {counted(len(self.classes), 'class')}"
        width = max(len(printable(name)) for name in self.environments)
        lines = [f"{printable(self.name)}: {counted(total, 'image')}, {sizes}"]
        for name, counts in zip(self.environments, self.counts, strict=True):
            by_class = ", ".join(f"{printable(of)} {n:,}" for of, n in zip(self.classes, counts, strict=True))
            if len(counts) > MOST_CLASSES:
                by_class = f"{min(counts):,} to {max(counts):,} per class"
            lines.append(f"  {printable(name):<{width}}  {sum(counts):,}: {by_class}")
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for each in self.left_out:
            by_reason[each.reason].append(printable(each.path))
        for reason, paths in by_reason.items():
            more = ", ..." if len(paths) > SHOWN_FILES else ""
            lines.append(f"  left out {len(paths):,} ({printable(reason)}): {', '.join(paths[:SHOWN_FILES])}{more}")
        return lines


def take_inventory(dataset: Dataset) -> Inventory:
    """Count the examples of a dataset by environment and class.

    :param dataset: the dataset.
    """
    parts = [dataset.labels[begin:end] for begin, end in zip(dataset.bounds, dataset.bounds[1:], strict=False)]
    counts = tuple(tuple(torch.bincount(part, minlength=len(dataset.classes)).tolist()) for part in parts)
    return Inventory(dataset.name, dataset.environments, dataset.classes, counts, dataset.left_out)
