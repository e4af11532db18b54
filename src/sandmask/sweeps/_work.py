"""How much a run asks of a machine, in numbers that time and memory are proportional to, about."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sandmask.datasets import Dataset
from sandmask.records import RunSpec
from sandmask.training.evaluation import evaluation_steps
from sandmask.training.stack import build_algorithm

_CONVOLVED = 160  # times the pixels: numbers that the MNIST ConvNet keeps of an example, about
_VECTOR = 1024  # an evaluation chunk's share of an example that is a vector
_EVALUATION_BYTES = 4 * 2**30  # more than this the evaluator does not take at once


@dataclass(frozen=True)
class Work:
    """What one run asks for."""

    step: float  # multiplications of a training step
    evaluation: float  # multiplications of an evaluation
    numbers: float  # that a step keeps in memory: gradients of every environment, activations
    evaluations: int
    examples: int
    environments: int


def work_of(spec: RunSpec, dataset: Dataset) -> Work:
    """The work of a run on a dataset."""
    network = build_algorithm(spec, dataset, weights="none", dropout=False).network
    batch = int(spec.hparams["batch_size"])
    n_train = len(dataset.environments) - len(spec.test_envs)
    kept = _kept(spec, dataset)
    each = max(network.numel, kept) if len(dataset.input_shape) == 1 else _image_work(network.numel, dataset)
    n_examples = dataset.bounds[-1]
    return Work(
        step=n_train * batch * each,
        evaluation=n_examples * each,
        numbers=n_train * (network.numel + batch * kept) + 4 * network.numel,
        evaluations=sum(1 for _ in evaluation_steps(spec.steps, spec.checkpoint_every)),
        examples=n_examples,
        environments=len(dataset.environments),
    )


def _kept(spec: RunSpec, dataset: Dataset) -> float:
    """Numbers that a network keeps of one example, for the way back."""
    if len(dataset.input_shape) == 1:
        return dataset.input_shape[0] + spec.hparams.get("mlp_depth", 3) * spec.hparams.get("mlp_width", 256)
    return _CONVOLVED * math.prod(dataset.input_shape[1:])


def _image_work(numel: int, dataset: Dataset) -> float:
    """A convolution uses its weights at every place; all networks of one kind are off by the same factor."""
    return numel * math.prod(dataset.input_shape[1:]) / 16


def evaluation_bytes(works: Sequence[Work], dataset: Dataset) -> float:
    """The memory of a stack's evaluation, which takes as many examples at once as fit into a fixed room."""
    each = _VECTOR if len(dataset.input_shape) == 1 else 64 * math.prod(dataset.input_shape[1:])
    return float(min(_EVALUATION_BYTES, 8 * len(works) * works[0].examples * each))
