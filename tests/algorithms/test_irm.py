"""IRM and the information bottleneck against autograd on a dummy scale and PyTorch's variance."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms.ib import feature_variances
from sandmask.algorithms.irm import irm_penalty, scale_derivative
from sandmask.functional import EnvBatch, make_batch, random

Minibatches = list[tuple[Tensor, Tensor]]
MakeHparams = Callable[..., dict[str, Tensor]]


def naive_derivative(logits: Tensor, y: Tensor) -> Tensor:
    scale = torch.ones((), dtype=logits.dtype, requires_grad=True)
    return torch.autograd.grad(F.cross_entropy(scale * logits, y), scale, create_graph=True)[0]


def naive_penalty(logits: Tensor, y: Tensor) -> Tensor:
    return naive_derivative(logits[::2], y[::2]) * naive_derivative(logits[1::2], y[1::2])


def random_logits(n_envs: int, n_examples: int) -> tuple[Tensor, EnvBatch]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(4, (n_envs, n_examples), generator=generator)
    batch = make_batch(torch.zeros(n_envs, n_examples, 1), y, random.key_of(0))
    return 3 * torch.randn(n_envs, n_examples, 4, generator=generator), batch


def test_the_closed_form_is_the_derivative_by_the_scale() -> None:
    logits, batch = random_logits(1, 9)
    ours = scale_derivative(logits[0], batch.y[0])
    expected = torch.stack([naive_derivative(logits[0, i : i + 1], batch.y[0, i : i + 1]) for i in range(9)])
    torch.testing.assert_close(ours, expected.detach())


def test_penalty_and_its_gradient_equal_those_by_double_backward() -> None:
    logits, batch = random_logits(3, 7)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    penalty = irm_penalty(ours, batch)
    expected = torch.stack([naive_penalty(theirs[e], batch.y[e]) for e in range(3)])
    torch.testing.assert_close(penalty, expected)
    (gradient,) = torch.autograd.grad(penalty.sum(), ours)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), theirs)
    torch.testing.assert_close(gradient, expected_gradient)


def test_the_penalty_may_be_negative() -> None:
    logits, batch = random_logits(50, 2)  # a product of two estimates, not a square
    assert (irm_penalty(logits, batch) < 0).any()


def test_padding_between_examples_does_not_change_which_half_they_are_in() -> None:
    logits, batch = random_logits(2, 6)
    expected = irm_penalty(logits, batch)
    wide_logits, wide_y, weight = (
        torch.full((2, 9, 4), 7.0),
        torch.zeros(2, 9, dtype=torch.int64),
        torch.zeros(2, 9),
    )
    places = [1, 2, 4, 5, 7, 8]
    wide_logits[:, places], wide_y[:, places], weight[:, places] = logits, batch.y, 1.0
    padded = make_batch(torch.zeros(2, 9, 1), wide_y, random.key_of(0), weight)
    torch.testing.assert_close(irm_penalty(wide_logits, padded), expected)


def test_one_example_has_no_penalty() -> None:
    logits, batch = random_logits(2, 1)
    assert irm_penalty(logits, batch).tolist() == [0.0, 0.0]


def test_irm_trains_like_the_naive_objective_through_the_jump_of_the_weight(
    hparams_of: MakeHparams, assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        total = torch.zeros(())
        for x, y in minibatches:
            logits = model["classifier"](model["featurizer"](x))
            total = total + F.cross_entropy(logits, y) + (50.0 if step >= 3 else 1.0) * naive_penalty(logits, y)
        return total / len(minibatches)

    hparams = hparams_of("IRM", irm_lambda=50, irm_penalty_anneal_iters=3)
    assert_minimizes("IRM", hparams, naive, reset_at=3)


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
