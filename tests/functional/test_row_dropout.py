"""Dropout whose noise follows the example."""

import math

import pytest
import torch
from torch.func import vmap

from sandmask.functional import Dropout, random

ROWS = random.keys(random.key_of(0), 400)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_units_are_dropped_at_the_rate_and_the_rest_scaled(rate: float) -> None:
    x = torch.rand(400, 100) + 0.5
    out = Dropout(torch.tensor(rate), ROWS)(x, 0)
    dropped = out == 0
    assert dropped.double().mean().item() == pytest.approx(rate, abs=5 * math.sqrt(0.25 / 40_000))
    torch.testing.assert_close(out[~dropped], x[~dropped] / (1 - rate))


def test_the_noise_follows_the_example_wherever_it_stands() -> None:
    x, rate = torch.rand(400, 10), torch.tensor(0.5)
    order = torch.randperm(400)
    out = Dropout(rate, ROWS)(x, 1)
    assert torch.equal(Dropout(rate, ROWS[order])(x[order], 1), out[order])
    assert torch.equal(Dropout(rate, ROWS[3:9])(x[3:9], 1), out[3:9])


def test_a_wider_layer_keeps_the_noise_of_its_first_units() -> None:
    x, drop = torch.rand(400, 12), Dropout(torch.tensor(0.5), ROWS)
    assert torch.equal(drop(x, 0)[:, :7], drop(x[:, :7], 0))


def test_examples_units_and_sites_have_noise_of_their_own() -> None:
    x, drop = torch.ones(400, 64), Dropout(torch.tensor(0.5), ROWS)
    one, two = (drop(x, site) == 0 for site in (0, 1))
    for a, b in ((one, two), (one[:-1], one[1:]), (one[:, :-1], one[:, 1:])):
        same = (a == b).double().mean().item()
        assert same == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / a.numel()))


def test_stacked_runs_have_rates_of_their_own() -> None:
    rates, rows, x = torch.tensor([0.0, 0.1, 0.5]), random.keys(random.key_of(1), 3, 8), torch.rand(3, 8, 5)
    together = vmap(lambda rate, rows, x: Dropout(rate, rows)(x, 2))(rates, rows, x)
    for k in range(3):
        assert torch.equal(together[k], Dropout(rates[k], rows[k])(x[k], 2))
