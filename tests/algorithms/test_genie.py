"""GENIE against its rule, one parameter after the other in plain Python."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import EnvBatch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def naive_signal(history: list[float]) -> tuple[float, float]:
    """q m and k of one parameter, of all its gradients so far."""
    t, beta = len(history), 0.95
    shares = [(1 - beta) * beta ** (t - 1 - i) / (1 - beta**t) for i in range(t)]
    mean = sum(share * g for share, g in zip(shares, history, strict=True))
    square = sum(share * g * g for share, g in zip(shares, history, strict=True))
    left = sum(share * share for share in shares)  # the variance of an average of independent numbers
    variance = (square - mean * mean) / (1 - left) if t > 1 else 0.0
    variance = variance if variance > 0 else 1e-8
    return mean / (1 + left * variance / (mean * mean + 1e-8)), math.tanh(min(1 / variance, 10.0))


def naive_signal_over_environments(gradients: list[float], decay: float) -> tuple[float, float]:
    """q m and k of one parameter, of the environments' gradients and a decay that they share."""
    n = len(gradients)
    mean = sum(gradients) / n
    variance = sum((g - mean) ** 2 for g in gradients) / (n - 1) or 1e-8
    mean += decay
    return mean / (1 + variance / n / (mean * mean + 1e-8)), math.tanh(min(1 / variance, 10.0))


@pytest.mark.parametrize("name", ["GENIE", "GENIE-environments"])
def test_trains_like_a_loop_over_parameters(
    name: str, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of(name, convergence_rate=0.05, update_drop=0.25)
    batches = [batch._replace(x=12 * batch.x) for batch in batches]  # gradients whose variance counts in k
    losses, state = train(name, batches, hparams)

    featurizer, trusts = problem.featurizer(), []
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    weights: Tensor = train(name, [], hparams)[1]["params"].clone()
    sizes = [slot.numel for slot in ALGORITHMS["GENIE"].build(problem).network.slots]
    history: list[Tensor] = []
    for step, batch in enumerate(batches):
        vector_to_parameters(weights.clone(), model.parameters())
        risks = [F.cross_entropy(model(x), y) for x, y in zip(batch.x, batch.y, strict=True)]
        loss = torch.stack(risks).mean()
        each = [parameters_to_vector(torch.autograd.grad(risk, list(model.parameters()))) for risk in risks]
        history.append(torch.stack(each).mean(0) + 1e-2 * weights)
        if name == "GENIE":
            found = [naive_signal([g[j].item() for g in history]) for j in range(len(weights))]
        else:
            decays = (1e-2 * weights).tolist()
            found = [
                naive_signal_over_environments([g[j].item() for g in each], decays[j]) for j in range(len(weights))
            ]
        trusts += [trust for _, trust in found]
        key = random.fold(random.key_of(5), step)
        normal = random.normal(random.fold(key, 0), len(weights)).tolist()
        kept = (random.uniform(random.fold(key, 1), len(weights)) >= 0.25).tolist()
        moved, start = weights.tolist(), 0
        for size in sizes:
            part = range(start, start + size)
            noise = sum(found[j][1] * abs(found[j][0]) for j in part) / sum(found[j][1] for j in part)
            for j in part:
                mean, trust = found[j]
                moved[j] -= kept[j] * 0.05 / 0.75 * (trust * mean + (1 - trust) * noise * normal[j])
            start += size
        weights = torch.tensor(moved, dtype=torch.float64)
        assert losses[step] == pytest.approx(loss.item(), rel=1e-9)
    assert min(trusts) < 0.9 < 0.99 < max(trusts)
    # The variance of equal gradients is a difference of two equal numbers, so rounding decides whether it counts.
    torch.testing.assert_close(state["params"], weights, rtol=1e-6, atol=1e-6)
