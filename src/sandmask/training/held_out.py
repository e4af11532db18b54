"""The training environments' gradients on examples that are not trained on, at an evaluation."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sandmask.algorithms import Algorithm, HeldOutProbe, Hparams, Metrics, State
from sandmask.datasets import Dataset
from sandmask.functional import EnvBatch
from sandmask.records import RunSpec
from sandmask.training.sampling import holdout_fraction, split_environment
from sandmask.training.stack_step import looped_step, stacked_step

EXAMPLES, IMAGES = 256, 32  # of each environment, at most: of small inputs, of those with over LARGE numbers
LARGE = 10_000


class HeldOut:
    """Takes the gradient of each training environment's risk on the first examples of its "out" split.

    They are the same ones at every evaluation, as many of every environment, whatever the run's batch size: curves have
    no noise of sampling, and runs can be compared. Nothing of the training changes.
    """

    def __init__(self, probe: HeldOutProbe, dataset: Dataset, specs: Sequence[RunSpec], *, stacks: bool) -> None:
        self.dataset = dataset
        self._step = (stacked_step(probe) if stacks else None) or looped_step(probe)
        count = examples_of(dataset, holdout_fraction(specs[0]))
        self.indices = torch.stack([self._indices(dataset, spec, count) for spec in specs]).to(dataset.labels.device)
        # No more examples at once than a training step has: what fits into memory then fits now.
        self._together = max(1, len(specs) * int(specs[0].hparams["batch_size"]) // count)

    @classmethod
    def of(cls, algorithm: Algorithm, dataset: Dataset, specs: Sequence[RunSpec], *, stacks: bool) -> "HeldOut | None":
        """For these runs; None where nothing is held out, or where a prediction takes more than the example."""
        probe = HeldOutProbe.of(algorithm)
        return (
            None
            if probe is None or not examples_of(dataset, holdout_fraction(specs[0]))
            else cls(probe, dataset, specs, stacks=stacks)
        )

    @staticmethod
    def _indices(dataset: Dataset, spec: RunSpec, count: int) -> Tensor:
        """Indices [E, count] of the examples of a run's training environments."""
        envs = (env for env in range(len(dataset.environments)) if env not in spec.test_envs)
        return torch.stack(
            [split_environment(dataset, env, spec.trial_seed, holdout_fraction(spec))[1][:count] for env in envs]
        )

    def __call__(self, state: State, hparams: Hparams) -> Metrics:
        """The probe's metrics [K]; never waits for the device where the dataset is there."""
        runs = torch.split(torch.arange(len(self.indices)), self._together)
        parts = [self._look(state["params"], hparams, slice(int(some[0]), int(some[-1]) + 1)) for some in runs]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _look(self, params: Tensor, hparams: Hparams, runs: slice) -> Metrics:
        indices = self.indices[runs]
        batch = EnvBatch(
            self.dataset.inputs(indices),
            self.dataset.labels[indices],
            torch.ones(indices.shape, device=indices.device),
            torch.zeros_like(indices),  # keys of dropout, which there is none of
        )
        own = {name: values[runs] for name, values in hparams.items()}
        return self._step({"params": params[runs]}, batch, own, torch.zeros_like(indices[:, 0, 0]))[1]


def examples_of(dataset: Dataset, fraction: float) -> int:
    """The number of examples per environment: as many as the smallest one has, within limits."""
    most = EXAMPLES if math.prod(dataset.input_shape) <= LARGE else IMAGES
    return min(
        most, *(len(split_environment(dataset, env, 0, fraction)[1]) for env in range(len(dataset.environments)))
    )
