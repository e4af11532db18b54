"""Fish, Arith, PGrad and MLDG against loops with PyTorch's optimizers."""

import copy
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms.mldg import split
from sandmask.algorithms.pgrad import part_of, principal_gradient
from sandmask.errors import SandmaskError
from sandmask.functional import EnvBatch, make_batch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize("meta_lr", [0.05, 0.5, 1.0])
def test_fish_trains_like_a_loop_with_a_clone(
    meta_lr: float, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Fish", meta_lr=meta_lr)
    losses, state = train("Fish", batches, hparams)

    featurizer = problem.featurizer()
    inner = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    optimizer = torch.optim.Adam(inner.parameters(), lr=3e-3, weight_decay=1e-2)
    weights = train("Fish", [], hparams)[1]["params"]
    for step, batch in enumerate(batches):
        vector_to_parameters(weights.clone(), inner.parameters())
        seen = []
        for e in random.permutation(random.fold(random.key_of(5), step), 3).tolist():
            loss = F.cross_entropy(inner(batch.x[e]), batch.y[e])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(loss.item())
        weights = weights + meta_lr * (parameters_to_vector(inner.parameters()).detach() - weights)
        assert losses[step] == pytest.approx(sum(seen) / 3, rel=1e-9)
    torch.testing.assert_close(state["params"], weights, rtol=1e-7, atol=1e-9)
    assert state["adam"].count.item() == 3 * len(batches)


def test_the_order_of_the_environments_changes_from_step_to_step(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    algorithm, hparams = ALGORITHMS["Fish"].build(problem), hparams_of("Fish")
    start = train("Fish", [], hparams)[1]
    ends = [algorithm.step(start, batches[0], hparams, random.key_of(seed))[0]["params"] for seed in range(40)]
    assert len({tuple(end.tolist()) for end in ends}) == 6  # the orders of three environments


def test_with_a_rate_of_zero_nothing_moves_but_the_inner_adam(
    batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Fish", meta_lr=0)
    _, state = train("Fish", batches, hparams)
    assert torch.equal(state["params"], train("Fish", [], hparams)[1]["params"])
    assert state["adam"].square.any()


def test_arith_trains_like_a_copy_that_sgd_moves(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("Arith", arith_lr=0.2)
    losses, state = train("Arith", batches, hparams)

    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    start: Tensor = train("Arith", [], hparams)[1]["params"]
    vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for step, batch in enumerate(batches):
        inner = copy.deepcopy(model)
        sgd = torch.optim.SGD(inner.parameters(), lr=0.2)
        optimizer.zero_grad()
        seen = []
        order = random.permutation(random.fold(random.key_of(5), step), 3).tolist()
        for weight, e in zip((1.5, 1.0, 0.5), order, strict=True):
            loss = F.cross_entropy(inner(batch.x[e]), batch.y[e])
            sgd.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for outer, moved in zip(model.parameters(), inner.parameters(), strict=True):
                assert moved.grad is not None
                share = weight * moved.grad / 3
                outer.grad = share if outer.grad is None else outer.grad + share
            sgd.step()
            seen.append(loss.item())
        optimizer.step()
        assert losses[step] == pytest.approx(sum(seen) / 3, rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)


def naive_pairs(n_envs: int, n_meta_test: int, key: Tensor) -> list[tuple[int, int]]:
    order = random.permutation(key, n_envs).tolist()
    n_meta_test = min(n_meta_test, n_envs - 1)
    return list(zip(order[:-n_meta_test], cycle(order[-n_meta_test:])))


@pytest.mark.parametrize("n_envs", [2, 3, 4, 7])
@pytest.mark.parametrize("n_meta_test", [1, 2, 3, 9])
def test_pairs_are_those_of_a_loop(n_envs: int, n_meta_test: int) -> None:
    for seed in range(5):
        key = random.key_of(seed)
        train, test, used = split(n_envs, torch.tensor(float(n_meta_test)), key)
        pairs = list(zip(train.tolist(), test.tolist(), strict=True))
        assert [pair for pair, use in zip(pairs, used.tolist(), strict=True) if use] == naive_pairs(
            n_envs, n_meta_test, key
        )


@pytest.mark.parametrize(("n_meta_test", "beta"), [(1, 1.0), (2, 0.3), (5, 4.0)])
def test_mldg_trains_like_deep_copies(
    n_meta_test: int,
    beta: float,
    problem: Problem,
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Train,
) -> None:
    hparams = hparams_of("MLDG", n_meta_test=n_meta_test, mldg_beta=beta)
    losses, state = train("MLDG", batches, hparams)

    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    vector_to_parameters(train("MLDG", [], hparams)[1]["params"].clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for step, batch in enumerate(batches):
        pairs = naive_pairs(3, n_meta_test, random.fold(random.key_of(5), step))
        optimizer.zero_grad()
        total = 0.0
        for i, j in pairs:
            inner = copy.deepcopy(model)
            inner_optimizer = torch.optim.Adam(inner.parameters(), lr=3e-3, weight_decay=1e-2)
            inner_loss = F.cross_entropy(inner(batch.x[i]), batch.y[i])
            inner_gradients = torch.autograd.grad(inner_loss, list(inner.parameters()))
            for p, gradient in zip(inner.parameters(), inner_gradients, strict=True):
                p.grad = gradient.clone()
            inner_optimizer.step()
            outer_loss = F.cross_entropy(inner(batch.x[j]), batch.y[j])
            outer_gradients = torch.autograd.grad(outer_loss, list(inner.parameters()))
            for p, g_i, g_j in zip(model.parameters(), inner_gradients, outer_gradients, strict=True):
                share = (g_i + beta * g_j) / len(pairs)
                p.grad = share if p.grad is None else p.grad + share
            total += (inner_loss.item() + beta * outer_loss.item()) / len(pairs)
        optimizer.step()
        assert losses[step] == pytest.approx(total, rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)


def test_two_environments_train_although_two_are_to_be_held_out(
    batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    pair = [EnvBatch(*(field[:2] for field in batch)) for batch in batches]
    hparams = hparams_of("MLDG", n_meta_test=2)
    start, end = (train("MLDG", some, hparams)[1]["params"] for some in ([], pair))
    assert (start - end).abs().median() > 1e-3


def test_one_environment_is_too_few(problem: Problem) -> None:
    with pytest.raises(SandmaskError, match="at least 2"):
        ALGORITHMS["MLDG"].build(Problem(problem.featurizer, 1, 2, (5,)))


def naive_principal_gradient(points: Tensor) -> Tensor:
    """PGrad's direction from a singular value decomposition of the trajectory [n + 1, P]."""
    way = points[0] - points[-1]
    _, deviations, directions = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    variances = deviations[:4] ** 2
    total = torch.zeros_like(way)
    for variance, direction in zip(variances, directions[:4], strict=True):
        sign = 1 if direction @ way > 0 else -1
        total += sign * direction * way.norm() * variance / variances.norm()
    return total


def test_pgrad_trains_like_a_loop_over_thirds_of_the_minibatches(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("PGrad", pgrad_lr=0.3, decoupled_decay=0.02)
    losses, state = train("PGrad", batches, hparams)

    featurizer = problem.featurizer()
    inner = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    optimizer = torch.optim.Adam(inner.parameters(), lr=3e-3)
    weights: Tensor = train("PGrad", [], hparams)[1]["params"]
    for step, batch in enumerate(batches):
        vector_to_parameters(weights.clone(), inner.parameters())
        points, seen = [weights], []
        key = random.fold(random.key_of(5), step)
        for number, (start, stop) in enumerate([(0, 2), (2, 4), (4, 7)]):  # of seven examples
            for e in random.permutation(random.fold(key, number), 3).tolist():
                loss = F.cross_entropy(inner(batch.x[e, start:stop]), batch.y[e, start:stop])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                points.append(parameters_to_vector(inner.parameters()).detach())
                seen.append(loss.item())
        weights = weights - 0.3 * (naive_principal_gradient(torch.stack(points)) + (1e-2 + 0.02) * weights)
        assert losses[step] == pytest.approx(sum(seen) / 9, rel=1e-7)
    torch.testing.assert_close(state["params"], weights, rtol=1e-6, atol=1e-8)
    assert state["adam"].count.item() == 9 * len(batches)


def test_pgrads_direction_descends_and_is_zero_where_nothing_moved() -> None:
    points = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).cumsum(0)
    way = points[0] - points[-1]
    assert principal_gradient(points) @ way > 0
    assert not principal_gradient(points[:1].expand(7, -1)).any()
    two = principal_gradient(points[:2])  # fewer directions than four
    torch.testing.assert_close(two, points[0] - points[1])


def test_a_run_that_diverges_under_pgrad_leaves_the_others_of_its_stack_alone() -> None:
    points = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0)).cumsum(1)
    alone = principal_gradient(points[1])
    points[0, 3, 5] = torch.inf
    diverged, other = torch.func.vmap(principal_gradient)(points)
    assert diverged.isnan().any()
    torch.testing.assert_close(other, alone)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_pgrads_parts_divide_the_true_examples(count: int) -> None:
    weight = torch.zeros(2, 7)
    weight[0, 7 - count :], weight[1] = 1, 1
    batch = make_batch(torch.arange(14.0).view(2, 7, 1), torch.zeros(2, 7, dtype=torch.int64), random.key_of(0), weight)
    parts = [part_of(batch, number) for number in range(3)]
    for e, true in enumerate((count, 7)):
        found = [part.x[e, part.weight[e] > 0].flatten().tolist() for part in parts]
        expected = batch.x[e, 7 - true :].flatten().tolist()
        thirds = [expected[i * true // 3 : (i + 1) * true // 3] for i in range(3)]
        assert found == (thirds if true >= 3 else [expected] * 3)
