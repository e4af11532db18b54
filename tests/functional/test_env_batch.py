"""Batches of several environments."""

import torch
from torch.func import vmap

from sandmask.functional import EnvBatch, make_batch, random


def some_batch(n_examples: int = 4) -> EnvBatch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, n_examples, 2, 5, generator=generator)
    y = torch.randint(7, (3, n_examples), generator=generator)
    return make_batch(x, y, random.key_of(0))


def test_splitting_puts_every_example_back_into_its_environment() -> None:
    batch = some_batch()
    assert batch.n_envs == 3
    assert batch.inputs.shape == (12, 2, 5)
    assert torch.equal(batch.split(batch.inputs), batch.x)


def test_the_mean_is_that_of_the_true_examples() -> None:
    batch = some_batch()
    values = torch.randn(3, 4)
    torch.testing.assert_close(batch.mean(values), values.mean(1))
    padded = batch._replace(weight=torch.tensor([[1.0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]]))
    expected = torch.stack([values[0].mean(), values[1, [0, 2]].mean(), values[2, 3]])
    torch.testing.assert_close(padded.mean(values), expected)


def test_an_environment_is_a_batch_of_one() -> None:
    batch = some_batch()
    one = batch.environment(1)
    assert one.n_envs == 1
    for field, part in zip(batch, one, strict=True):
        assert torch.equal(part[0], field[1])


def test_taking_environments_follows_the_order_given() -> None:
    batch = some_batch()
    taken = batch.take(torch.tensor([2, 0, 2, 1]))
    for field, part in zip(batch, taken, strict=True):
        assert torch.equal(part, torch.stack([field[2], field[0], field[2], field[1]]))


def test_stacked_runs_take_environments_of_their_own() -> None:
    batches = [some_batch(), some_batch()]
    stacked = EnvBatch(*(torch.stack(fields) for fields in zip(*batches, strict=True)))
    orders = torch.tensor([[0, 1, 2], [2, 1, 0]])
    taken = vmap(lambda batch, order: batch.take(order))(stacked, orders)
    for k in range(2):
        assert torch.equal(taken.x[k], batches[k].x[orders[k]])


def test_every_example_has_a_key_that_a_longer_batch_does_not_change() -> None:
    short, long = some_batch(4), some_batch(6)
    assert torch.equal(long.example_keys[:, :4], short.example_keys)
    assert len(set(long.example_keys.flatten().tolist())) == 18
    assert short.weight.dtype == torch.float32
    assert short.weight.all()
