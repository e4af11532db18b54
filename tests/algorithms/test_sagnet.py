"""SagNet against modules, three of PyTorch's Adams and styles computed row by row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms.sagnet import Exchange
from sandmask.functional import EnvBatch, make_batch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def naive_exchange(features: Tensor, exchange: Exchange, what: str) -> Tensor:
    rows = []
    for i, row in enumerate(features):
        other = features[exchange.partner[i]]
        mean, var = row.mean(), row.var()
        content = (row - mean) / (var + 1e-5).sqrt()
        if what == "style":
            share = exchange.ratio[i]
            mean = share * mean + (1 - share) * other.mean()
            var = share * var + (1 - share) * other.var()
        else:
            content = ((other - other.mean()) / (other.var() + 1e-5).sqrt()).detach()
        rows.append(content * (var + 1e-5).sqrt() + mean)
    return torch.stack(rows)


def test_trains_like_three_modules_in_turn(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("SagNet", sag_w_adv=0.6)
    losses, state = train("SagNet", batches, hparams)

    start = train("SagNet", [], hparams)[1]
    f = problem.featurizer().double()
    c, s = (nn.Linear(f.n_features, problem.n_classes).double() for _ in range(2))
    vector_to_parameters(start["params"].clone(), [*f.parameters(), *c.parameters()])
    vector_to_parameters(start["style"].clone(), s.parameters())
    of_f, of_c, of_s = (torch.optim.Adam(part.parameters(), lr=3e-3, weight_decay=1e-2) for part in (f, c, s))

    def learn(loss: Tensor, *optimizers: torch.optim.Optimizer) -> float:
        for part in (of_f, of_c, of_s):
            part.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    for step, batch in enumerate(batches):
        key = random.fold(random.key_of(5), step)
        first, second, third = (Exchange(batch, random.fold(key, turn)) for turn in range(3))
        x, y = batch.x.flatten(0, 1), batch.y.flatten()
        content = learn(F.cross_entropy(c(naive_exchange(f(x), first, "style")), y), of_f, of_c)
        learn(F.cross_entropy(s(naive_exchange(f(x), second, "content")), y), of_s)
        swapped = naive_exchange(f(x), third, "content")
        learn(0.6 * -F.log_softmax(s(swapped), dim=1).mean(1).mean(), of_f)
        assert losses[step] == pytest.approx(content, rel=1e-9)
    expected = parameters_to_vector([*f.parameters(), *c.parameters()]).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(state["style"], parameters_to_vector(s.parameters()).detach(), rtol=1e-7, atol=1e-9)
    assert state["adam"].count.item() == 2 * len(batches)
    assert state["content_adam"].count.item() == len(batches)


def some_batch(n_examples: int, n_true: int) -> EnvBatch:
    weight = (torch.arange(n_examples) < n_true).float().expand(3, n_examples)
    return make_batch(
        torch.zeros(3, n_examples, 1), torch.zeros(3, n_examples, dtype=torch.int64), random.key_of(0), weight
    )


def test_partners_are_a_random_order_of_the_true_examples_whatever_the_padding() -> None:
    whole, wide = some_batch(5, 5), some_batch(9, 5)
    true = (wide.weight.flatten() > 0).nonzero().squeeze(1)
    orders = set()
    for seed in range(20):
        exchange, other = Exchange(whole, random.key_of(seed)), Exchange(wide, random.key_of(seed))
        assert sorted(exchange.partner.tolist()) == list(range(15))
        assert other.partner[true].tolist() == true[exchange.partner].tolist()
        assert torch.equal(other.ratio[true], exchange.ratio)
        orders.add(tuple(exchange.partner.tolist()))
    assert len(orders) == 20


def test_mixing_with_oneself_changes_nothing_and_swapping_keeps_the_style() -> None:
    exchange = Exchange(some_batch(5, 5), random.key_of(1))
    features = 3 * torch.randn(15, 8) + 1
    swapped = exchange.swap_contents(features)
    torch.testing.assert_close(swapped.mean(1), features.mean(1))
    torch.testing.assert_close(swapped.var(1), features.var(1), rtol=1e-3, atol=1e-4)
    exchange.partner = torch.arange(15)
    torch.testing.assert_close(exchange.mix_styles(features), features)
    torch.testing.assert_close(exchange.swap_contents(features), features)


def test_the_style_head_has_a_start_of_its_own(problem: Problem) -> None:
    state = ALGORITHMS["SagNet"].build(problem).init(0)
    assert not torch.equal(state["style"], state["params"][-len(state["style"]) :])
