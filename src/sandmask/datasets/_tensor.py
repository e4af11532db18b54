"""Small datasets: one tensor of inputs and one of labels, on the device."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask.datasets._base import Dataset
from sandmask.errors import SandmaskError


class TensorDataset(Dataset):
    """Environments given as (inputs [n, ...], labels [n]) pairs.

    Inputs of type uint8 stay so in memory and become float in 0..1 when asked for.
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
        """It is one tensor, wherever that is."""
        return True

    def inputs(self, indices: Tensor) -> Tensor:
        """The examples with these numbers: [*indices.shape, *input_shape], float32."""
        chosen = self.stored[indices]
        return chosen / 255.0 if chosen.dtype == torch.uint8 else chosen

    def to(self, device: torch.device) -> "TensorDataset":
        """A copy on `device`."""
        moved = copy.copy(self)
        moved.stored = self.stored.to(device)
        moved.labels = self.labels.to(device)
        return moved


def _check_parts(
    name: str, environments: Sequence[str], classes: Sequence[str], parts: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Check that names, inputs and labels fit together."""
    if len(environments) != len(parts) or not parts:
        raise SandmaskError(f"{name}: found {len(environments)} environment names for {len(parts)} environments.")
    for environment, (inputs, labels) in zip(environments, parts, strict=True):
        where = f"{name}, environment {environment!r}"
        if len(inputs) != len(labels) or not len(labels):
            raise SandmaskError(
                f"{where}: found {len(inputs)} inputs and {len(labels)} labels; expected as many, not 0."
            )
        if inputs.dtype not in (torch.uint8, torch.float32):
            raise SandmaskError(f"{where}: inputs should be float32 or uint8. Found {inputs.dtype}.")
        if inputs.dtype != parts[0][0].dtype or inputs.shape[1:] != parts[0][0].shape[1:]:
            raise SandmaskError(
                f"{where}: inputs should be like those of {environments[0]!r}, {_form(parts[0][0])}. "
                f"Found {_form(inputs)}."
            )
        if labels.min() < 0 or labels.max() >= len(classes):
            raise SandmaskError(f"{where}: labels should be in 0..{len(classes) - 1} for {len(classes)} classes.")


def _form(inputs: Tensor) -> str:
    return f"{inputs.dtype} of shape {list(inputs.shape[1:])}"
