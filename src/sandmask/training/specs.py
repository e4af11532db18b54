"""From what a user asks for to a complete run spec, and which specs can train as one program."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import Dataset, DatasetEntry
from sandmask.errors import SandmaskError
from sandmask.hparams import DEFAULT_SPACE, resolve, space_for
from sandmask.records import RunSpec
from sandmask.training.averaging import parse_averages
from sandmask.training.sampling import HOLDOUT_FRACTION

# Hyperparameters that decide shapes; all others are numbers that may differ within a stack.
SHAPE_HPARAMS = ("batch_size", "mlp_width", "mlp_depth")
# Networks whose runs gain from a stack. A large backbone fills the machine by itself.
STACKED_NETWORKS = ("mlp", "mnist-convnet")
MOST_EVALUATIONS = 100_000  # of one run


def make_spec(
    entry: DatasetEntry,
    algorithm: str,
    test_envs: Sequence[int],
    *,
    steps: int | None = None,
    checkpoint_every: int | None = None,
    hparams: Mapping[str, str | float] | None = None,
    hparams_seed: int = 0,
    trial_seed: int = 0,
    seed: int = 0,
    space: str = DEFAULT_SPACE,
    network: str | None = None,
    weights: str | None = None,
    precision: str = "fp32",
    averages: Sequence[str] = (),
) -> RunSpec:
    """Return a complete, validated spec; arguments that are None follow the dataset's protocol.

    :param entry: the dataset.
    :param algorithm: name of an algorithm.
    :param test_envs: indices of the environments to hold out.
    :param steps: training steps.
    :param checkpoint_every: steps between evaluations.
    :param hparams: values of hyperparameters by name, instead of the drawn ones.
    :param hparams_seed: number of the random draw; 0 means the defaults.
    :param trial_seed: number of the repetition, which decides the draw and the data splits.
    :param seed: seed of weights, minibatches and other randomness.
    :param space: "recipe", "paper" or "domainbed".
    :param network: "mlp", "mnist-convnet" or a timm name.
    :param weights: file with pretrained weights, "pretrained" or "none".
    :param precision: "fp32", "tf32", "bf16" or "fp16".
    :param averages: averages of the weights that are evaluated too: "sma", "ema", "swad".
    """
    chosen = ALGORITHMS[algorithm]
    values = resolve(
        space_for(entry.scope, entry.name, chosen.name, chosen.hparams, space), hparams_seed, trial_seed, hparams
    )
    steps = entry.steps_in(space) if steps is None else steps
    checkpoint_every = entry.checkpoint_every if checkpoint_every is None else checkpoint_every
    for name, value in (("steps", steps), ("checkpoint_every", checkpoint_every)):
        if not 1 <= value < 2**63:
            raise SandmaskError(f"{name} should be at least 1 and less than 2^63. Found {value}.")
    _check_evaluations(steps, checkpoint_every)
    for name, value in (("seed", seed), ("hparams_seed", hparams_seed), ("trial_seed", trial_seed)):
        if not 0 <= value < 2**63:
            raise SandmaskError(f"{name} should be from 0 to 2^63 - 1. Found {value}.")
    network = network or entry.network
    return RunSpec(
        dataset=entry.name,
        algorithm=chosen.name,
        test_envs=tuple(sorted(set(test_envs))),
        steps=steps,
        checkpoint_every=checkpoint_every,
        hparams=values,
        hparams_seed=hparams_seed,
        trial_seed=trial_seed,
        seed=seed,
        space=space,
        network=network,
        weights=_weights_name(network, weights),
        precision=precision,
        options={"averages": ",".join(kept)} if (kept := parse_averages(averages)) else {},
    )


def _check_evaluations(steps: int, every: int) -> None:
    """Refuse more evaluations than memory and a record file should hold."""
    if steps > every * MOST_EVALUATIONS:
        raise SandmaskError(
            f"{steps:,} steps with an evaluation every {every:,} are over {MOST_EVALUATIONS:,} evaluations, which is "
            f"the limit. Evaluate less often, with --checkpoint-every {-(-steps // MOST_EVALUATIONS)} or more, or take "
            "fewer --steps."
        )


def _weights_name(network: str, weights: str | None) -> str:
    """The name of the initial weights in records: a file name without its folder."""
    if network in ("mlp", "mnist-convnet"):
        return "none"
    return "pretrained" if weights is None else Path(weights).name


def check_environments(spec: RunSpec, dataset: Dataset) -> None:
    """Refuse a split that leaves too little to train on."""
    n_envs = len(dataset.environments)
    for env in spec.test_envs:
        if not 0 <= env < n_envs:
            raise SandmaskError(f"{dataset.name} has environments 0 to {n_envs - 1}. Found test environment {env}.")
    if len(dataset.classes) < 2:
        raise SandmaskError(f"{dataset.name} has a single class, {dataset.classes[0]!r}: there is nothing to learn.")
    n_train = n_envs - len(spec.test_envs)
    if n_train < 2:
        raise SandmaskError(
            f"{spec.algorithm} needs at least 2 environments to train on; {dataset.name} has {n_envs}, of which "
            f"{len(spec.test_envs)} are held out. Hold out fewer."
        )
    sizes = np.diff(dataset.bounds)
    if int(HOLDOUT_FRACTION * sizes.min()) < 1:
        smallest = int(sizes.argmin())
        raise SandmaskError(
            f"Every environment should have at least {round(1 / HOLDOUT_FRACTION)} examples, as some of them are held "
            f"back for selection. Found {sizes[smallest]} in {dataset.environments[smallest]!r} of {dataset.name}."
        )


def stack_key(spec: RunSpec) -> tuple[object, ...]:
    """Return a key; runs with equal keys differ in numbers only and can train as one stack.

    :param spec: spec of a run.
    """
    shapes = tuple(spec.hparams.get(name) for name in SHAPE_HPARAMS)
    return (
        *(spec.dataset, spec.algorithm, spec.network, spec.weights, spec.precision),
        *(spec.steps, spec.checkpoint_every, len(spec.test_envs), spec.options.get("averages")),
        shapes,
        tuple(sorted(spec.hparams)),  # a number that only some runs have would count for none, or be missing
    )


def trains_alone(spec: RunSpec) -> bool:
    """Whether a run is better trained by itself: its network fills the machine."""
    return spec.network not in STACKED_NETWORKS
