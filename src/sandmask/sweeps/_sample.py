"""The first examples of every environment: enough to measure how long an evaluation takes."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sandmask.datasets import Dataset


class Sample(Dataset):
    """A dataset cut down to at most `most` examples of each environment; otherwise the dataset itself."""

    def __init__(self, base: Dataset, most: int) -> None:
        self.base, self.most = base, most
        self.name, self.environments, self.classes = base.name, base.environments, base.classes
        self.input_shape, self.domains = base.input_shape, base.domains
        starts = base.bounds[:-1]
        sizes = [min(most, stop - start) for start, stop in zip(starts, base.bounds[1:], strict=True)]
        self.bounds = tuple(torch.tensor([0, *sizes]).cumsum(0).tolist())
        kept = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._numbers = torch.cat(kept).to(base.labels.device)
        self.labels = base.labels[self._numbers]

    @property
    def resident(self) -> bool:
        """As the dataset is."""
        return self.base.resident

    def inputs(self, indices: Tensor) -> Tensor:
        """The examples with these numbers."""
        return self.base.inputs(self._numbers[indices])

    def to(self, device: torch.device) -> "Sample":
        """The same on `device`."""
        return Sample(self.base.to(device), self.most)

    def training_inputs(self, indices: Tensor, key: Tensor) -> Tensor:
        """The examples as a training step sees them."""
        return self.base.training_inputs(self._numbers[indices], key)

    def batches(self, indices: Iterable[Tensor], depth: int = 4) -> Iterator[Tensor]:
        """`inputs` of each element in turn."""
        return self.base.batches((self._numbers[some] for some in indices), depth)

    def training_batches(self, requests: Iterable[tuple[Tensor, Tensor]], depth: int = 4) -> Iterator[Tensor]:
        """`training_inputs` of each (indices, key) in turn."""
        return self.base.training_batches(((self._numbers[some], key) for some, key in requests), depth)
