"""SelfReg against PyTorch's batch-norm and a loop over classes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import Problem, State
from sandmask.algorithms.selfreg import partners
from sandmask.functional import EnvBatch, make_batch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def naive_partners(batch: EnvBatch, key: Tensor) -> list[int]:
    y, noise = batch.y.flatten().tolist(), random.uniform(random.fold(batch.example_keys.flatten(), key)).tolist()
    found = [0] * len(y)
    for c in set(y):
        members = [i for i in range(len(y)) if y[i] == c]
        for i, partner in zip(members, sorted(members, key=noise.__getitem__), strict=True):
            found[i] = partner
    return found


def naive_projection(n: int) -> nn.Sequential:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Linear(a, b), nn.BatchNorm1d(b)]

    return nn.Sequential(*block(n, 2 * n), nn.ReLU(), *block(2 * n, 2 * n), nn.ReLU(), *block(2 * n, n)).double()


def load(projection: nn.Sequential, vector: Tensor) -> None:
    """The layers come first in the vector, then all scales, then all offsets."""
    linear = [module for module in projection if isinstance(module, nn.Linear)]
    norms = [module for module in projection if isinstance(module, nn.BatchNorm1d)]
    order = [p for m in linear for p in (m.weight, m.bias)] + [m.weight for m in norms] + [m.bias for m in norms]
    vector_to_parameters(vector.clone(), order)


def test_trains_like_pytorchs_batch_norm_and_a_loop_over_classes(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    hparams = hparams_of("SelfReg", lr=0.03)
    batches = [batch._replace(y=(batch.x[..., 0] > 0).long()) for batch in batches[:1] * 12]  # easy to learn
    losses, state = train("SelfReg", batches, hparams)

    start = train("SelfReg", [], hparams)[1]
    featurizer = problem.featurizer().double()
    classifier = nn.Linear(featurizer.n_features, problem.n_classes).double()
    model = nn.Sequential(featurizer, classifier)
    vector_to_parameters(start["params"].clone(), model.parameters())
    projection = naive_projection(featurizer.n_features)
    load(projection, start["projection"])
    optimizer = torch.optim.Adam([*model.parameters(), *projection.parameters()], lr=0.03, weight_decay=1e-2)
    risks = []
    for step, batch in enumerate(batches):
        key = random.fold(random.key_of(5), step)
        lam = random.symmetric_beta(random.fold(key, 0), torch.tensor(0.5)).item()
        a, b = (naive_partners(batch, random.fold(key, turn)) for turn in (1, 2))
        z = featurizer(batch.x.flatten(0, 1))
        o, p = classifier(z), projection(z)
        o3, p3 = lam * o[a] + (1 - lam) * o[b], lam * p[a] + (1 - lam) * p[b]
        distance = lam * (F.mse_loss(o, o[a]) + 0.3 * F.mse_loss(z, p[a]))
        distance = distance + (1 - lam) * (F.mse_loss(o, o3) + 0.3 * F.mse_loss(z, p3))
        risk = F.cross_entropy(o, batch.y.flatten())
        risks.append(risk.item())
        loss = risk + min(risk.item(), 1.0) * distance
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-6)
    assert max(risks) > 1 > min(risks)  # on both sides of the bend
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-5, atol=1e-7)


def test_partners_are_permutations_within_classes_and_padding_is_nobodys() -> None:
    y = torch.tensor([[0, 1, 0, 2, 1], [1, 1, 0, 0, 0]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0]])
    batch = make_batch(torch.zeros(2, 5, 1), y, random.key_of(0), weight)
    for seed in range(20):
        found = partners(batch, 3, random.key_of(seed))
        assert sorted(found.tolist()) == list(range(10))
        true = batch.weight.flatten() > 0
        assert torch.equal(y.flatten()[found][true], y.flatten()[true])
        assert true[found][true].all()
