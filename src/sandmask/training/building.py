"""From a spec to what a run is computed with: the algorithm, its way to take gradients, its images."""

from typing import Protocol

import torch

from sandmask.algorithms import ALGORITHMS, Algorithm, MaskedAlgorithm, Problem
from sandmask.datasets import Dataset, ImageDataset
from sandmask.errors import SandmaskError
from sandmask.functional import AcrossRuns, Autograd, Differentiator, Direct, Functional
from sandmask.functional.across_processes import AcrossProcesses
from sandmask.functional.ranks import ALONE, Ranks
from sandmask.networks import Network, build_featurizer, normalization
from sandmask.records import RunSpec
from sandmask.training.precision import compute_dtype, temporary_precision
from sandmask.training.specs import SIZE_HPARAMS

# Above this many parameters a run fills the machine by itself, and E gradients at once are too many to keep.
LARGE_MODEL = 4_000_000


class Shapes(Protocol):
    """The shapes that an algorithm is built for, from a dataset or a model file."""

    @property
    def environments(self) -> tuple[str, ...]:
        """Their names, held-out ones included."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""
        ...

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        ...


def build_algorithm(spec: RunSpec, dataset: Shapes, *, weights: str | None, dropout: bool) -> Algorithm:
    """The algorithm of a spec, built for a dataset."""
    sizes = {name: int(spec.hparams[name]) for name in SIZE_HPARAMS if name in spec.hparams}
    featurizer = build_featurizer(spec.network, dataset.input_shape, sizes, weights)
    problem = Problem(
        featurizer=featurizer,
        n_envs=len(dataset.environments) - len(spec.test_envs),
        n_classes=len(dataset.classes),
        input_shape=dataset.input_shape,
        sizes=sizes,
        dropout=dropout,
        dtype=compute_dtype(spec.precision),
    )
    with temporary_precision(spec.precision):  # which decides what kernels a network has
        return ALGORITHMS[spec.algorithm].build(problem)


def choose_differentiator(
    network: Network, n_runs: int, ranks: Ranks, *, stacks: bool, kernels: bool
) -> Differentiator:
    """Choose how gradients are computed: together for small models, one after the other for large ones."""
    if ranks.size > 1:
        return AcrossProcesses(ranks, choose_differentiator(network, n_runs, ALONE, stacks=stacks, kernels=kernels))
    if network.numel > LARGE_MODEL or not stacks:
        return Autograd()
    if n_runs == 1:
        return Direct()
    return AcrossRuns() if kernels else Functional()


def check_precision(spec: RunSpec, algorithm: Algorithm) -> None:
    """float16 has a small range, which takes scaling; that is done where each environment's gradient is on its own."""
    if spec.precision == "fp16" and not (spec.network == "mlp" and isinstance(algorithm, MaskedAlgorithm)):
        raise SandmaskError(
            f"--precision fp16 is for gradient masks on the MLP only. Found {spec.algorithm} with {spec.network}. "
            "Use tf32, which is as exact, or bf16."
        )
    if algorithm.network.embeds and compute_dtype(spec.precision) != torch.float32:
        raise SandmaskError(
            f"The network {spec.network} uses its inputs as indices, which --precision {spec.precision} would round. "
            "Use fp32 or tf32."
        )


def prepared_for(spec: RunSpec, dataset: Dataset) -> Dataset:
    """Images with the means and deviations that a network's weights were trained on, augmented or not."""
    if not isinstance(dataset, ImageDataset):
        return dataset
    if not spec.hparams.get("data_augmentation", 1):
        dataset = dataset.unaugmented()
    return dataset.normalized_by(*normalization(spec.network))
