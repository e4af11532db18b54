"""Histograms of agreement against a loop over elements and exact fractions."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask.masks import agreement_counts


def naive(sign_sum: Tensor, count: int, bins: int) -> list[int]:
    counts = [0] * bins
    for value in sign_sum.tolist():
        agreement = Fraction(abs(int(value)), count)
        found = [b for b in range(bins) if Fraction(b, bins) <= agreement < Fraction(b + 1, bins)]
        counts[found[0] if found else bins - 1] += 1
    return counts


def sums_of_signs(count: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (count, size), generator=generator).float().sum(0)


@pytest.mark.parametrize("bins", [1, 3, 10])
@pytest.mark.parametrize("count", [2, 3, 7, 10, 16, 30])
def test_counts_are_those_of_a_loop(count: int, bins: int) -> None:
    signs = torch.cat([sums_of_signs(count, 200), torch.arange(-count, count + 1).float()])
    assert agreement_counts(signs, count, bins).tolist() == naive(signs, count, bins)


def test_an_agreement_on_an_edge_is_in_the_bin_that_begins_there() -> None:
    every = torch.arange(11).float()  # agreements 0, 0.1, ..., 1 of ten environments
    assert agreement_counts(every, 10).tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]


def test_an_empty_tensor_has_no_elements_in_any_bin() -> None:
    assert agreement_counts(torch.zeros(0), 3).tolist() == [0.0] * 10


def test_runs_stack() -> None:
    signs = torch.stack([sums_of_signs(5, 40, seed) for seed in range(3)])
    stacked = vmap(lambda each: agreement_counts(each, 5))(signs)
    assert stacked.tolist() == [naive(each, 5, 10) for each in signs]
