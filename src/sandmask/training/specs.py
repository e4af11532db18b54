"""Create complete run specs from a user's arguments, and decide which specs can train as one program."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sandmask._text import counted
from sandmask.algorithms import ALGORITHMS, Algorithm, MaskedAlgorithm
from sandmask.datasets import Dataset, DatasetEntry
from sandmask.errors import SandmaskError
from sandmask.hparams import DEFAULT_SPACE, Hparam, resolve, seed_hash, space_for
from sandmask.networks import NETWORKS
from sandmask.records import MEASURES, RunSpec, averages_of
from sandmask.training.averaging import SMA_START, parse_averages
from sandmask.training.precision import compute_dtype
from sandmask.training.sampling import holdout_fraction, split_environment
from sandmask.training.schedule import PATIENCE, repeats

# Hyperparameters that determine shapes. All other hyperparameters are numbers that may differ within a stack.
NETWORK_HPARAMS = ("nonlinear_classifier", "last_blocks", "attention_only", "freeze_bn")
SIZE_HPARAMS = ("batch_size", "mlp_width", "mlp_depth", *NETWORK_HPARAMS)
SHAPE_HPARAMS = (*SIZE_HPARAMS, "holdout_fraction", "class_balanced", "data_augmentation")
INIT, SHARED = "init", "shared"  # the option of runs that start from the weights of their trial
MOST_EVALUATIONS = 100_000  # per run
MOST_NUMBERS = 50_000_000  # per metric and run: 200 MB of memory


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
    shared_init: bool = False,
) -> RunSpec:
    """Return a complete, validated spec. Arguments that are None follow the protocol of the dataset.

    :param entry: the dataset.
    :param algorithm: name of an algorithm.
    :param test_envs: indices of the environments to hold out.
    :param steps: training steps.
    :param checkpoint_every: steps between evaluations.
    :param hparams: values of hyperparameters by name, which replace the drawn values.
    :param hparams_seed: number of the random draw; 0 means the defaults.
    :param trial_seed: number of the repetition, which decides the draw and the data splits.
    :param seed: seed of weights, minibatches and other randomness.
    :param space: "recipe", "paper" or "domainbed".
    :param network: "mlp", "mnist-convnet" or a timm name.
    :param weights: file with pretrained weights, "pretrained" or "none".
    :param precision: "fp32", "fp32x3", "tf32", "bf16" or "fp16".
    :param averages: averages of the weights to evaluate in addition: "sma", "ema", "swad".
    :param shared_init: take the initial weights from the trial instead of the seed.
    """
    chosen = ALGORITHMS[algorithm]
    values = resolve(
        space_for(entry.scope, entry.name, chosen.name, chosen.hparams, space), hparams_seed, trial_seed, hparams
    )
    _check_patience(values)
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
    if network in NETWORKS:
        network, weights_name = NETWORKS[network].name, "none"
    else:
        weights_name = "pretrained" if weights is None else Path(weights).name
    kept = parse_averages(averages)
    options = {"averages": ",".join(kept)} if kept else {}
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
        weights=weights_name,
        precision=precision,
        options={**options, INIT: SHARED} if shared_init else options,
    )


def _check_patience(hparams: Mapping[str, float]) -> None:
    """Check that a run with lr_patience either has a validation loss or repeats the drops of a run that has."""
    if not hparams.get(PATIENCE) or bool(hparams.get("full_data")) == repeats(hparams):
        return
    if repeats(hparams):
        raise SandmaskError("lr_patience cannot be combined with lr_drop_step_1 to 3. Leave out one of them.")
    raise SandmaskError(
        "lr_patience needs validation examples, but full_data=1 trains on them. To repeat the learning-rate drops of "
        "the sweep without full_data, name its folder with --first-stage."
    )


def init_seed(spec: RunSpec) -> int:
    """The seed of a run's initial weights: its own seed, or the common seed of its trial."""
    return seed_hash(INIT, spec.trial_seed) if spec.options.get(INIT) == SHARED else spec.seed


def _check_evaluations(steps: int, every: int) -> None:
    """Raise an error for more evaluations than fit in memory and a record file."""
    if steps > every * MOST_EVALUATIONS:
        raise SandmaskError(
            f"{steps:,} steps with an evaluation every {every:,} exceed the limit of {MOST_EVALUATIONS:,} evaluations. "
            f"Evaluate less often, with --checkpoint-every {-(-steps // MOST_EVALUATIONS)} or more, or use fewer "
            "--steps."
        )


def check_environments(spec: RunSpec, dataset: Dataset) -> None:
    """Raise an error if too few environments, classes or examples are left to train on."""
    n_envs = len(dataset.environments)
    for env in spec.test_envs:
        if not 0 <= env < n_envs:
            raise SandmaskError(f"{dataset.name} has environments 0 to {n_envs - 1}. Found test environment {env}.")
    if len(dataset.classes) < 2:
        raise SandmaskError(f"{dataset.name} should have at least two classes. Found one: {dataset.classes[0]!r}.")
    n_train, least = n_envs - len(spec.test_envs), 2 if ALGORITHMS[spec.algorithm].compares_environments else 1
    if n_train < least:
        advice = "Hold out fewer." if n_envs > least else f"Use a dataset with at least {least + 1}."
        raise SandmaskError(
            f"{spec.algorithm} needs at least {counted(least, 'environment')} to train on; {dataset.name} has "
            f"{n_envs}, {len(spec.test_envs)} of them held out. {advice}"
        )
    sizes = np.diff(dataset.bounds)
    fraction = holdout_fraction(spec)
    for env in sizes.argsort(kind="stable").tolist():
        if not all(map(len, split_environment(dataset, env, spec.trial_seed, fraction))):
            raise SandmaskError(
                f"Every environment should have at least {math.ceil(1 / fraction)} examples, or examples of both "
                f"splits, because some examples are held back for selection. Found {sizes[env]} in "
                f"{dataset.environments[env]!r} of {dataset.name}."
            )


def check_precision(spec: RunSpec, algorithm: Algorithm) -> None:
    """Raise an error for a precision that the network or the algorithm does not support.

    float16 needs scaled losses, which only gradient masks on the MLP support.
    """
    scales = spec.network == "mlp" and isinstance(algorithm, MaskedAlgorithm) and algorithm.through_logits
    if spec.precision == "fp16" and not scales:
        raise SandmaskError(
            "--precision fp16 supports only gradient masks on the MLP with the cross-entropy of its logits. Found "
            f"{spec.algorithm} with {spec.network}. Use tf32, which has the same precision, or bf16."
        )
    if algorithm.network.embeds and compute_dtype(spec.precision) != torch.float32:
        raise SandmaskError(
            f"The network {spec.network} uses its inputs as indices, which --precision {spec.precision} would round. "
            "Use fp32 or tf32."
        )


def check_measures(names: Sequence[str], spec: RunSpec, dataset: Dataset) -> None:
    """Raise an error for metrics with too many numbers for memory and a record file."""
    evaluations = -(-spec.steps // spec.checkpoint_every) + 1
    for name in names:
        numbers = evaluations * MEASURES[name].size(len(dataset.environments), len(dataset.classes))
        if numbers > MOST_NUMBERS:
            raise SandmaskError(
                f"The metric {name!r} of {dataset.name} has {numbers:,} numbers per run; the limit is "
                f"{MOST_NUMBERS:,}. Leave it out, or evaluate less often with --checkpoint-every."
            )


def check_train_eval_limit(limit: int | None) -> None:
    """Raise an error for a limit below 1, because the accuracy on no examples would be NaN."""
    if limit is not None and limit < 1:
        raise SandmaskError(f"train_eval_limit should be at least 1. Found {limit}.")


def flat_spec(spec: RunSpec) -> dict[str, Any]:
    """The fields of a spec in one dict; a hyperparameter is named "hparams lr"."""
    flat: dict[str, Any] = {}
    for name, value in spec.to_json().items():
        flat |= {f"{name} {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def stack_key(spec: RunSpec) -> tuple[object, ...]:
    """Return a key. Runs with equal keys differ only in numbers and can train as one stack.

    :param spec: spec of a run.
    """
    shapes = tuple(spec.hparams.get(name) for name in SHAPE_HPARAMS)
    return (
        *(spec.dataset, spec.algorithm, spec.network, spec.weights, spec.precision),
        *(spec.steps, spec.checkpoint_every, len(spec.test_envs), spec.options.get("averages")),
        shapes,
        tuple(sorted(spec.hparams)),  # a stack needs the same hyperparameters in all runs
    )


def leak_of(spec: RunSpec) -> str | None:
    """Return a warning if the environments of a run influence each other's gradients; None otherwise.

    :param spec: spec of the run.
    """
    if spec.hparams.get("freeze_bn", 1):
        return None
    return (
        "freeze_bn=0: batch-norm computes its statistics from all examples that pass the network together. Most "
        "methods pass all environments together, so environments influence each other. Masks pass them separately."
    )


def unreached_steps(spec: RunSpec) -> list[str]:
    """Return the hyperparameters that are steps at which a method changes, if the run ends before these steps.

    :param spec: spec of the run.
    """
    rows = ALGORITHMS[spec.algorithm].hparams
    names = dict.fromkeys(row.name for row in rows if isinstance(row, Hparam) and row.step)
    return [name for name in names if spec.hparams.get(name, 0) > spec.steps - 1]


def early_end_of(spec: RunSpec) -> str | None:
    """Return a warning if a run ends before the step at which its method changes; None otherwise.

    :param spec: spec of the run.
    """
    if not (late := unreached_steps(spec)):
        return None
    values = " and ".join(f"{name} = {spec.hparams[name]:g}" for name in late)
    return (
        f"{values} is not reached in {counted(spec.steps, 'step')}, so the run stays in the first phase of "
        f"{spec.algorithm}. Set a lower value with --hparam {late[0]}=N, or train longer with --steps."
    )


def short_average_of(spec: RunSpec) -> str | None:
    """Return a warning if a run ends before its uniform average (SMA) begins; None otherwise.

    :param spec: spec of the run.
    """
    start = int(spec.hparams.get("sma_start", SMA_START))
    if "sma" not in averages_of(spec.options) or spec.steps > start + 1:
        return None
    return (
        f"--average sma leaves out the first {counted(start, 'step')}, so the average of a run of "
        f"{counted(spec.steps, 'step')} is its last weights. Start earlier with --hparam sma_start=N, or train longer "
        "with --steps."
    )


def trains_alone(spec: RunSpec) -> bool:
    """Whether runs of this network train one at a time, because it is a timm network or cannot be stacked."""
    return spec.network not in NETWORKS or not NETWORKS[spec.network].stacks
