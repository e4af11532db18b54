"""RSC against autograd's gradients and NumPy's percentiles."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms.rsc import below_percentile


@given(st.integers(1, 40), st.floats(0, 1, width=32), st.integers(0, 2**32 - 1))
def test_below_percentile_is_numpys(n: int, fraction: float, seed: int) -> None:
    rank = (n - 1) * fraction
    assume(abs(rank - round(rank)) > 2e-3)  # whole ranks have a test of their own
    values = np.random.RandomState(seed).randn(3, n).astype(np.float32)
    percentiles = np.percentile(values.astype(np.float64), 100 * fraction, axis=1, keepdims=True)
    ours = below_percentile(torch.from_numpy(values), torch.tensor(fraction))
    assert torch.equal(ours, torch.from_numpy(values < percentiles))


@pytest.mark.parametrize("n", [2, 7, 50, 1000])
def test_the_value_at_a_whole_rank_is_not_below_the_percentile(n: int) -> None:
    values = torch.randn(n)
    ours = [below_percentile(values, torch.tensor(rank / (n - 1))).sum().item() for rank in range(n)]
    assert ours == list(range(n))  # whatever rank / (n - 1) was rounded to


@pytest.mark.parametrize("n", [4, 256, 1024, 2047])
def test_a_third_of_the_features_is_a_third_whatever_the_rounding(n: int) -> None:
    values = torch.randn(2, n)
    kept = below_percentile(values, 1.0 - torch.tensor(1 / 3)).sum(-1)
    assert kept.tolist() == [-(-2 * (n - 1) // 3)] * 2


def test_ties_at_the_percentile_are_not_below_it() -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0])
    assert below_percentile(values, torch.tensor(0.6)).tolist() == [True, False, False, False, False]
    assert np.percentile(values.numpy(), 60) == 1.0


def test_padding_sorts_last_and_is_not_counted() -> None:
    values = torch.tensor([3.0, torch.inf, 1.0, 2.0, torch.inf])
    ours = below_percentile(values, torch.tensor(0.5), torch.tensor(3))
    assert ours.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("f_drop", "b_drop"), [(1 / 3, 1 / 3), (0.45, 0.12), (0.0, 0.5)])
def test_trains_like_autograd_and_numpy_percentiles(
    hparams_of: Callable[..., dict[str, Tensor]],
    assert_minimizes: Callable[..., None],
    f_drop: float,
    b_drop: float,
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        x = torch.cat([x for x, _ in minibatches])
        y = torch.cat([y for _, y in minibatches])
        features = model["featurizer"](x)
        logits = model["classifier"](features)
        (gradient,) = torch.autograd.grad(logits[range(len(y)), y].sum(), features, retain_graph=True)
        keep = torch.ones_like(features)
        for i, row in enumerate(gradient.double().numpy()):
            keep[i] = torch.from_numpy(row < np.percentile(row, 100 * (1 - f_drop)) - 1e-9)
        muted = model["classifier"](features * keep)
        confidences = [logits.softmax(1)[range(len(y)), y], muted.softmax(1)[range(len(y)), y]]
        lost = (confidences[0] - confidences[1]).detach().double().numpy()
        for place in np.flatnonzero(lost < np.percentile(lost, 100 * (1 - b_drop)) - 1e-9):
            keep[int(place)] = 1.0
        assert 0 < (keep == 0).sum() < keep.numel() / 2
        return F.cross_entropy(model["classifier"](features * keep), y)

    hparams = hparams_of("RSC", rsc_f_drop_factor=f_drop, rsc_b_drop_factor=b_drop)
    assert_minimizes("RSC", hparams, naive)
