"""Diagnostics of the gradients of training environments on validation examples: the metrics `held_out_...`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask.algorithms import HeldOutProbe, Hparams, Metrics, State
from sandmask.datasets import Dataset
from sandmask.functional import EnvBatch
from sandmask.records import RunSpec
from sandmask.training.sampling import holdout_fraction, split_environment, training_splits
from sandmask.training.stack_step import looped_step, stacked_step

EXAMPLES, IMAGES = 256, 32  # limits per environment; `IMAGES` is for examples of more than `LARGE` numbers
LARGE = 10_000


class ValidationGradients:
    """Computes the metrics of a `HeldOutProbe` on the first examples of the "out" splits of training environments.

    The examples are the same at every evaluation, so that curves have no sampling noise. Each environment has the same
    number of examples, so that runs can be compared.
    """

    def __init__(self, probe: HeldOutProbe, dataset: Dataset, specs: Sequence[RunSpec], *, stacks: bool) -> None:
        self.dataset = dataset
        self._step = (stacked_step(probe) if stacks else None) or looped_step(probe)
        smallest = min(
            len(split_environment(dataset, env, 0, holdout_fraction(specs[0]))[1])
            for env in range(len(dataset.environments))
        )
        count = min(EXAMPLES if math.prod(dataset.input_shape) <= LARGE else IMAGES, smallest)
        of_runs = [torch.stack([out[:count] for _, out in training_splits(dataset, spec)]) for spec in specs]
        self.indices = torch.stack(of_runs).to(dataset.labels.device)  # [K, E, count]
        # The number of examples is at most that of a training step, which is known to fit into memory.
        self._runs_at_a_time = max(1, len(specs) * int(specs[0].hparams["batch_size"]) // count)

    def __call__(self, state: State, hparams: Hparams) -> Metrics:
        """Return the probe's metrics [K]. If the dataset is resident, this does not wait for the device."""
        starts = range(0, len(self.indices), self._runs_at_a_time)
        runs = [slice(start, start + self._runs_at_a_time) for start in starts]
        parts = [self._measure(state["params"], hparams, some) for some in runs]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _measure(self, params: Tensor, hparams: Hparams, runs: slice) -> Metrics:
        indices = self.indices[runs]
        batch = EnvBatch(
            self.dataset.inputs(indices),
            self.dataset.labels[indices],
            torch.ones(indices.shape, device=indices.device),
            torch.zeros_like(indices),  # keys, which are not used, because there is no dropout
        )
        keys = torch.zeros_like(indices[:, 0, 0])
        hparams = {name: values[runs] for name, values in hparams.items()}
        return self._step({"params": params[runs]}, batch, hparams, keys)[1]
