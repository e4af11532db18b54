"""The information bottleneck against PyTorch's variance and autograd on a dummy scale."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms.ib import feature_variances

Minibatches = list[tuple[Tensor, Tensor]]
MakeHparams = Callable[..., dict[str, Tensor]]


def test_variances_are_pytorchs_whatever_the_padding() -> None:
    features, weight = torch.randn(3, 9, 4), torch.zeros(3, 9)
    for e, count in enumerate((9, 6, 2)):
        weight[e, :count] = 1
    expected = torch.stack([features[e, :count].var(0).mean() for e, count in enumerate((9, 6, 2))])
    torch.testing.assert_close(feature_variances(features, weight), expected)


def test_one_example_has_no_variance() -> None:
    assert not feature_variances(torch.randn(2, 1, 3), torch.ones(2, 1)).any()


def test_ib_erm_trains_like_the_naive_objective(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    def naive(model: nn.ModuleDict, minibatches: Minibatches, step: int) -> Tensor:
        total = torch.zeros(())
        for x, y in minibatches:
            z = model["featurizer"](x)
            total = total + F.cross_entropy(model["classifier"](z), y)
            total = total + (20.0 if step >= 2 else 0.0) * z.var(dim=0).mean()
        return total / len(minibatches)

    hparams = hparams_of("IB_ERM", ib_lambda=20, ib_penalty_anneal_iters=2)
    assert_minimizes("IB_ERM", hparams, naive, reset_at=2)


def test_ib_irm_trains_like_the_naive_objective_through_both_jumps(
    hparams_of: MakeHparams, assert_minimizes: Callable[..., None]
) -> None:
    def slope(logits: Tensor, y: Tensor) -> Tensor:
        scale = torch.ones((), dtype=logits.dtype, requires_grad=True)
        return torch.autograd.grad(F.cross_entropy(scale * logits, y), scale, create_graph=True)[0]

    def naive(model: nn.ModuleDict, minibatches: Minibatches, step: int) -> Tensor:
        total = torch.zeros(())
        for x, y in minibatches:
            z = model["featurizer"](x)
            logits = model["classifier"](z)
            penalty = slope(logits[::2], y[::2]) * slope(logits[1::2], y[1::2])
            total = total + F.cross_entropy(logits, y) + (30.0 if step >= 2 else 1.0) * penalty
            total = total + (20.0 if step >= 4 else 0.0) * z.var(dim=0).mean()
        return total / len(minibatches)

    hparams = hparams_of("IB_IRM", ib_lambda=20, ib_penalty_anneal_iters=4, irm_lambda=30, irm_penalty_anneal_iters=2)
    assert_minimizes("IB_IRM", hparams, naive, reset_at=(2, 4))
