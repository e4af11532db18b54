"""What every method with one objective must keep: padding, differentiators, stacks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import Autograd, EnvBatch, random

NAMES = ["ERM", "IRM", "VREx", "GroupDRO", "Mixup", "SD", "IGA", "CORAL", "MMD", "RSC"]
ANNEALED = {
    "IRM": {"irm_penalty_anneal_iters": 2, "irm_lambda": 20},
    "VREx": {"vrex_penalty_anneal_iters": 2, "vrex_lambda": 20},
    "IGA": {"penalty": 30},
}

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def padded(batch: EnvBatch, n: int) -> EnvBatch:
    """The batch with `n` more rows an environment, of weight 0 and with other contents."""
    n_envs = batch.n_envs
    return EnvBatch(
        torch.cat([batch.x, 9 * torch.randn(n_envs, n, *batch.x.shape[2:])], 1),
        torch.cat([batch.y, torch.ones(n_envs, n, dtype=torch.int64)], 1),
        torch.cat([batch.weight, torch.zeros(n_envs, n)], 1),
        torch.cat([batch.example_keys, torch.arange(n).expand(n_envs, n)], 1),
    )


def assert_same_training(first: tuple[list[float], State], second: tuple[list[float], State]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-9)
    leaves, others = pytree.tree_leaves(first[1]), pytree.tree_leaves(second[1])
    assert len(leaves) == len(others)
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_padding_changes_nothing(
    name: str, dropout: float, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of(name, dropout=dropout, **ANNEALED.get(name, {}))
    wide = [padded(batch, 4) for batch in batches]
    assert_same_training(train(name, batches, hparams), train(name, wide, hparams))


@pytest.mark.parametrize("name", NAMES)
def test_both_differentiators_give_the_same_numbers(
    name: str, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of(name, dropout=0.1, **ANNEALED.get(name, {}))
    other = train(name, batches, hparams, problem=problem.with_differentiator(Autograd()))
    assert_same_training(train(name, batches, hparams), other)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(other[1]))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_in_a_stack_is_the_run_alone(
    name: str, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    algorithm = ALGORITHMS[name].build(problem)
    seeds = [5, 6]
    own = {row.name: float(row.default) for row in ALGORITHMS[name].hparams}  # type: ignore[union-attr]
    runs = [
        hparams_of(name, **ANNEALED.get(name, {})),
        hparams_of(name, dropout=0.2, lr=1e-3, **{hparam: value / 2 for hparam, value in own.items()}),
    ]
    hparams = {key: torch.stack([run[key] for run in runs]) for key in runs[0]}
    state = pytree.tree_map(lambda *leaves: torch.stack(leaves), *(algorithm.init(seed) for seed in seeds))
    state = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state)
    streams = torch.stack([random.key_of(seed) for seed in seeds])
    losses = []
    for step, batch in enumerate(batches):
        both = EnvBatch(*(torch.stack([field, field.flip(0)]) for field in batch))
        state, metrics = vmap(algorithm.step)(state, both, hparams, random.fold(streams, step))
        losses.append(metrics["loss"])
    flipped = [EnvBatch(*(field.flip(0) for field in batch)) for batch in batches]
    for k, feed in enumerate((batches, flipped)):
        alone = train(name, feed, runs[k], seed=seeds[k])
        stacked = [loss[k].item() for loss in losses], pytree.tree_map(lambda leaf, k=k: leaf[k], state)
        assert_same_training(alone, stacked)
