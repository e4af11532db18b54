"""The minibatches of a stack: examples are drawn, read, and copied to tensors [K, E, B, ...]."""

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sandmask.datasets import Dataset
from sandmask.functional import EnvBatch, random
from sandmask.training.sampling import Sampler

INDICES, EXAMPLE_KEYS, AUGMENT, STEP = range(4)  # the uses of a step's random key
STEPS_DRAWN = 16  # number of steps whose examples are drawn at once on the host


class Minibatches:
    """Creates the minibatches of K runs, which depend only on the keys of the runs and the number of the step.

    :param dataset: the dataset.
    :param sampler: draws the examples.
    :param keys: random keys of the runs, [K].
    :param steps: number of training steps.
    :param rows: indices in a minibatch [E * B] of the examples that this process reads; None if it reads all of them.
    """

    def __init__(self, dataset: Dataset, sampler: Sampler, keys: Tensor, steps: int, rows: Tensor | None) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.keys = keys
        self.steps = steps
        self._rows = None if rows is None else {"cpu": rows, keys.device.type: rows.to(keys.device)}
        self._weight = torch.ones(len(keys), sampler.n_envs, sampler.batch_size, device=keys.device)

    def read(self, start: int) -> Generator[Any, None, None]:
        """Yield the data for steps `start`, `start` + 1, ..., to pass to `of_steps`.

        The indices of the examples are drawn on the host, so that reading does not wait for the device.
        """
        sampler, keys = self.sampler.to(torch.device("cpu")), self.keys.cpu()

        def requests() -> Iterator[tuple[Tensor, Tensor]]:
            for steps in torch.split(torch.arange(start, self.steps), STEPS_DRAWN):
                step_keys = random.fold(keys, steps.unsqueeze(-1))
                indices = sampler(random.fold(step_keys, INDICES))
                yield from map(self._own_part, indices, random.fold(step_keys, AUGMENT))

        yield from self.dataset.read_batches(requests())

    def of_steps(self, start: Tensor, count: int, read: Sequence[Any] = ()) -> Iterator[EnvBatch]:
        """Yield the minibatches of `count` steps, beginning with step `start`, a tensor on the device.

        For datasets that are not resident, `read` is the data that `read()` yields for these steps.
        """
        steps = start + torch.arange(count, device=self.keys.device)
        step_keys = random.fold(self.keys, steps.unsqueeze(-1))  # [count, K]
        indices = self.sampler(random.fold(step_keys, INDICES))  # [count, K, E, B]
        example_keys = random.keys(random.fold(step_keys, EXAMPLE_KEYS), *self._weight.shape[1:])
        augment = random.fold(step_keys, AUGMENT)
        labels = self.dataset.labels[indices]
        for step in range(count):
            own_indices, own_keys = self._own_part(indices[step], augment[step])
            if read:
                x = self.dataset.prepare(read[step], own_indices.shape, own_keys)
            else:
                x = self.dataset.training_inputs(own_indices, own_keys)
            yield EnvBatch(self._placed(x), labels[step], self._weight, example_keys[step])

    def _own_part(self, indices: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The examples that this process reads, out of all examples [K, E, B], and the keys of their augmentations.

        A single process reads all examples, with one key per run, [K]. One of several processes reads n examples of
        each run, [K, n], with one key per example.
        """
        if self._rows is None:
            return indices, keys
        rows = self._rows[indices.device.type]
        example_keys = random.keys(keys, *indices.shape[1:])  # the same as if one process read all examples
        return indices.flatten(1)[:, rows], example_keys.flatten(1)[:, rows]

    def _placed(self, x: Tensor) -> Tensor:
        """Inputs [K, E, B, ...], with the inputs that this process read, and NaN for examples of other processes."""
        if self._rows is None:
            return x
        shape = self._weight.shape
        whole = x.new_full((len(x), shape[1] * shape[2], *x.shape[2:]), math.nan if x.is_floating_point() else 0)
        whole[:, self._rows[x.device.type]] = x
        return whole.view(len(x), *shape[1:], *x.shape[2:])
