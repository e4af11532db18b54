"""VREx, SD, GroupDRO, RDM, Fishr and IGA against their formulas, written out."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandmask.algorithms import Problem, State
from sandmask.algorithms.iga import scatter
from sandmask.functional import Autograd, EnvBatch, Functional, random
from sandmask.networks import MNISTConvNet

MakeHparams = Callable[..., dict[str, Tensor]]


def test_vrex_trains_like_the_naive_objective_through_the_jump_of_the_weight(
    hparams_of: MakeHparams, assert_minimizes: Callable[..., None]
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        mean = (risks[0] + risks[1] + risks[2]) / 3
        variance = ((risks[0] - mean) ** 2 + (risks[1] - mean) ** 2 + (risks[2] - mean) ** 2) / 3
        return mean + (1.0 if step < 2 else 20.0) * variance

    hparams = hparams_of("VREx", vrex_lambda=20, vrex_penalty_anneal_iters=2)
    assert_minimizes("VREx", hparams, naive, reset_at=2)


def test_the_variance_of_vrex_is_numpys_population_variance(
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    losses = {
        weight: train("VREx", batches[:1], hparams_of("VREx", vrex_lambda=weight, vrex_penalty_anneal_iters=0))[0][0]
        for weight in (0, 1)
    }
    risks = [train("ERM", [batches[0].environment(e)], hparams_of("ERM"))[0][0] for e in range(3)]
    assert losses[0] == pytest.approx(np.mean(risks), rel=1e-5)
    assert losses[1] - losses[0] == pytest.approx(np.var(risks), rel=1e-3)
    assert np.var(risks) > 1e-4


def test_sd_trains_like_the_naive_objective(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        x = torch.cat([x for x, _ in minibatches])
        y = torch.cat([y for _, y in minibatches])
        logits = model["classifier"](model["featurizer"](x))
        square = torch.zeros(())
        for row in logits:
            for logit in row:
                square = square + logit**2
        loss: Tensor = F.cross_entropy(logits, y) + 0.8 * square / logits.numel()
        return loss

    assert_minimizes("SD", hparams_of("SD", sd_reg=0.8), naive)


def test_group_dro_trains_like_algorithm_1(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    q = [1.0, 1.0, 1.0]

    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        total = torch.zeros(())
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        for e, risk in enumerate(risks):
            q[e] *= math.exp(0.5 * risk.item())
        q[:] = [weight / sum(q) for weight in q]
        for weight, risk in zip(q, risks, strict=True):
            total = total + weight * risk
        return total

    assert_minimizes("GroupDRO", hparams_of("GroupDRO", groupdro_eta=0.5), naive)


def test_the_weights_of_group_dro_are_kept_and_grow_where_the_risk_is_largest(
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    hparams = hparams_of("GroupDRO", groupdro_eta=0.1, lr=0)
    risks = [train("ERM", [batches[0].environment(e)], hparams_of("ERM"))[0][0] for e in range(3)]
    _, state = train("GroupDRO", [batches[0]] * 4, hparams)
    expected = torch.softmax(4 * 0.1 * torch.tensor(risks, dtype=torch.float64), 0)
    torch.testing.assert_close(state["q"], expected)


def test_a_huge_risk_gives_a_weight_of_one_rather_than_nan(
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    batch = batches[0]._replace(x=batches[0].x * torch.tensor([1.0, 1.0, 1e7]).view(-1, 1, 1))
    hparams = hparams_of("GroupDRO", groupdro_eta=0.1)
    losses, state = train("GroupDRO", [batch], hparams)
    assert state["q"].tolist() == pytest.approx([0, 0, 1])
    assert math.isfinite(losses[0])


def kernel_mean(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=a.dtype)
    for x in a:
        for y in b:
            for power in range(-4, 4):
                total = total + torch.exp(-(10.0**power) * (x - y) ** 2)
    return total / (len(a) * len(b))


def test_rdm_trains_like_loops_over_pairs(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        losses = [
            F.cross_entropy(model["classifier"](model["featurizer"](x)), y, reduction="none") for x, y in minibatches
        ]
        means = [loss.mean() for loss in losses]
        risk = (means[0] + means[1] + means[2]) / 3
        if step < 3:
            return risk
        worst, everyone = losses[max(range(3), key=lambda e: means[e].item())], torch.cat(losses)
        distance = kernel_mean(worst, worst) + kernel_mean(everyone, everyone) - 2 * kernel_mean(worst, everyone)
        return risk + 5.0 * distance + 0.1 * (everyone.var() + worst.var())

    hparams = hparams_of("RDM", rdm_lambda=5, variance_weight=0.1, rdm_penalty_anneal_iters=3, rdm_lr=1e-3)
    assert_minimizes("RDM", hparams, naive, reset_at=3, later_lr=1e-3)


def naive_variance(model: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    """The biased variance of the examples' gradients by weight and bias of the classifier, as one vector."""
    z, head = model["featurizer"](x), list(model["classifier"].parameters())
    gradients = []
    for i in range(len(x)):
        loss = F.cross_entropy(model["classifier"](z[i : i + 1]), y[i : i + 1])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, head, create_graph=True)]))
    return torch.stack(gradients).var(dim=0, correction=0)


def test_fishr_trains_like_a_loop_over_examples(hparams_of: MakeHparams, assert_minimizes: Callable[..., None]) -> None:
    ema, averages = 0.9, [torch.zeros(()) for _ in range(3)]

    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        smooth = []
        for e, (x, y) in enumerate(minibatches):
            average = ema * averages[e] + (1 - ema) * naive_variance(model, x, y)
            averages[e] = average.detach()
            smooth.append(average / (1 - ema))
        mean = (smooth[0] + smooth[1] + smooth[2]) / 3
        penalty = torch.stack([((variance - mean) ** 2).mean() for variance in smooth]).sum()
        return torch.stack(risks).mean() + (500.0 if step >= 2 else 0.0) * penalty / 3

    hparams = hparams_of("Fishr", **{"lambda": 500, "penalty_anneal_iters": 2, "ema": ema})
    assert_minimizes("Fishr", hparams, naive, reset_at=2)


@pytest.mark.parametrize("weight", [0.0, 100.0])
def test_the_averages_of_fishr_are_kept_from_the_first_step_on(
    weight: float,
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Callable[..., tuple[list[float], State]],
) -> None:
    hparams = hparams_of("Fishr", **{"lambda": weight, "penalty_anneal_iters": 9})
    _, state = train("Fishr", batches[:1], hparams)
    assert (state["variances"] > 0).all()


@pytest.mark.parametrize("constant_mean", [True, False])
def test_iga_trains_like_a_loop_with_double_backward(
    hparams_of: MakeHparams, assert_minimizes: Callable[..., None], constant_mean: bool
) -> None:
    def naive(model: nn.ModuleDict, minibatches: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        risks = [F.cross_entropy(model["classifier"](model["featurizer"](x)), y) for x, y in minibatches]
        rows = []
        for risk in risks:
            gradients = torch.autograd.grad(risk, list(model.parameters()), create_graph=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        mean = (rows[0] + rows[1] + rows[2]) / 3
        if constant_mean:
            mean = mean.detach()
        distance = sum(((row - mean) ** 2).sum() for row in rows)
        return (risks[0] + risks[1] + risks[2]) / 3 + 30.0 * distance

    assert_minimizes("IGA", hparams_of("IGA", penalty=30), naive)


def test_the_scatter_of_equal_gradients_is_zero() -> None:
    gradient = torch.randn(3, 4)
    assert scatter({"w": gradient.expand(5, 3, 4)}).item() == pytest.approx(0.0, abs=1e-10)
    assert scatter({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([[0.0], [2.0]])}).item() == pytest.approx(4.0)


def test_both_differentiators_agree_on_iga_with_a_convolutional_network(
    hparams_of: MakeHparams, train: Callable[..., tuple[list[float], State]]
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.tensor([[0, 1, 0], [1, 1, 0]])
    batch = EnvBatch(x, y, torch.ones(2, 3), random.keys(random.key_of(0), 2, 3))
    params = []
    for differentiate in (Functional(), Autograd()):
        problem = Problem(lambda: MNISTConvNet(1), 2, 2, (1, 8, 8), differentiate=differentiate)
        hparams = hparams_of("IGA", penalty=10, lr=1e-3)
        losses, state = train("IGA", [batch], hparams, problem=problem)
        assert torch.tensor(losses).isfinite().all()
        params.append(state["adam"].mean)  # the gradient: Adam's sign would hide its size
    torch.testing.assert_close(params[0], params[1], rtol=1e-7, atol=1e-10)
