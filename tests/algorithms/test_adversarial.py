"""DANN, CDANN and ADRMX against PyTorch's modules, autograd and Adam."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.algorithms._adversarial import Discriminator
from sandmask.algorithms.adrmx import NonlinearHeads, contrast, pairs_of_classes
from sandmask.algorithms.dann import CDANN
from sandmask.functional import EnvBatch, make_batch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]

OWN = {"lr_g": 3e-3, "lr_d": 2e-3, "weight_decay_g": 1e-2, "weight_decay_d": 3e-2, "lambda": 0.7}


@pytest.fixture
def sized(problem: Problem) -> Problem:
    return replace(problem, sizes={"mlp_width": 8, "mlp_depth": 4})


def naive_weights(y: Tensor, n_classes: int, conditional: bool) -> Tensor:
    counts = [(y == c).sum().item() for c in range(n_classes)]
    weights = [1 / (counts[label] * n_classes) if conditional else 1 / len(y) for label in y]
    return torch.tensor(weights, dtype=torch.float64)


def naive_training(
    problem: Problem, batches: list[EnvBatch], hparams: dict[str, float], start: State, conditional: bool
) -> tuple[list[tuple[float, float]], Tensor, Tensor]:
    """Losses of classifier and discriminator, and the final vectors of generator and discriminator."""
    featurizer = problem.featurizer()
    classifier = nn.Linear(featurizer.n_features, problem.n_classes)
    generator = nn.ModuleList([featurizer, classifier]).double()
    discriminator = Discriminator(featurizer.n_features, 3, problem.n_classes if conditional else 0, 8, 4).double()
    vector_to_parameters(start["params"].clone(), generator.parameters())
    vector_to_parameters(start["discriminator"].clone(), discriminator.parameters())
    betas = (hparams["beta1"], 0.9)
    g_optimizer, d_optimizer = (
        torch.optim.Adam(
            part.parameters(),
            lr=hparams[f"lr_{who}"],
            betas=betas,
            weight_decay=hparams[f"weight_decay_{who}"],
        )
        for part, who in ((generator, "g"), (discriminator, "d"))
    )
    losses = []
    for count, batch in enumerate(batches, start=1):
        x, y = batch.x.flatten(0, 1), batch.y.flatten()
        envs = torch.arange(3).repeat_interleave(batch.y.shape[1])
        features = featurizer(x)
        z = features + discriminator.embedding[y] if conditional else features
        out = discriminator.mlp(z)
        each = F.cross_entropy(out, envs, reduction="none")
        (slope,) = torch.autograd.grad(each.sum(), z, create_graph=True)
        penalty = (slope**2).sum(1).mean()
        weights = naive_weights(y, problem.n_classes, conditional)
        d_loss = (weights * each).sum() + hparams["grad_penalty"] * penalty
        risk = F.cross_entropy(classifier(features), y)
        losses.append((risk.item(), d_loss.item()))
        turn = hparams["d_steps_per_g_step"]
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
        if count % (1 + turn) < turn:
            d_loss.backward()  # type: ignore[no-untyped-call]
            d_optimizer.step()
        else:
            (risk - hparams["lambda"] * d_loss).backward()  # type: ignore[no-untyped-call]
            g_optimizer.step()
    g_vector, d_vector = (parameters_to_vector(part.parameters()) for part in (generator, discriminator))
    return losses, g_vector.detach(), d_vector.detach()


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
@pytest.mark.parametrize(("turn", "beta1", "grad_penalty"), [(1, 0.5, 0.0), (2, 0.0, 0.8), (1, 0.5, 2.0)])
def test_dann_and_cdann_train_like_modules_that_take_turns(
    name: str,
    turn: int,
    beta1: float,
    grad_penalty: float,
    sized: Problem,
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Train,
) -> None:
    values = {**OWN, "d_steps_per_g_step": turn, "beta1": beta1, "grad_penalty": grad_penalty}
    hparams = hparams_of(name, **values)
    losses, state = train(name, batches, hparams, sized)
    start = train(name, [], hparams, sized)[1]
    expected, g_vector, d_vector = naive_training(sized, batches, values, start, name == "CDANN")
    assert losses == pytest.approx([risk for risk, _ in expected], rel=1e-9)
    torch.testing.assert_close(state["params"], g_vector, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(state["discriminator"], d_vector, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_one_network_moves_at_a_time_and_each_counts_its_own_steps(
    turn: int, sized: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    algorithm, hparams = ALGORITHMS["DANN"].build(sized), hparams_of("DANN", **OWN, d_steps_per_g_step=turn)
    state = train("DANN", [], hparams, sized)[1]
    whose = []
    for count, batch in enumerate(batches, start=1):
        before = state
        state, _ = algorithm.step(state, batch, hparams, random.key_of(count))
        moved = {part: not torch.equal(state[part], before[part]) for part in ("params", "discriminator")}
        assert sum(moved.values()) == 1
        whose.append(moved["discriminator"])
    assert whose == [count % (1 + turn) < turn for count in range(1, 7)]
    assert state["discriminator_adam"].count.item() == sum(whose)
    assert state["adam"].count.item() == 6 - sum(whose)


def test_classes_weigh_the_same_whatever_their_number_and_the_padding(problem: Problem) -> None:
    y = torch.tensor([[0, 0, 0, 1, 3], [0, 1, 0, 0, 3]])
    weight = torch.tensor([[1.0, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    batch = make_batch(torch.zeros(2, 5, 5), y, random.key_of(0), weight)
    algorithm = ALGORITHMS["CDANN"].build(problem)
    assert isinstance(algorithm, CDANN)
    weights = algorithm.example_weights(batch)
    assert weights[y == 0].sum().item() == pytest.approx(1 / 4)
    assert weights[y == 1].tolist() == pytest.approx([1 / 8, 1 / 8])
    assert weights[y == 3].tolist() == [0, 0]


def test_the_discriminator_has_dropout_of_its_own(
    sized: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    algorithm = ALGORITHMS["DANN"].build(sized)
    rates = [hparams_of("DANN", **OWN, mlp_dropout=rate) for rate in (0.0, 0.5)]
    start = train("DANN", [], rates[0], sized)[1]
    losses = [algorithm.step(start, batches[0], hparams, random.key_of(0))[1] for hparams in rates]
    assert losses[0]["loss"] == losses[1]["loss"]
    assert losses[0]["discriminator_loss"] != losses[1]["discriminator_loss"]


def test_the_discriminators_size_is_a_hyperparameter_and_its_start_is_not_the_networks(
    problem: Problem,
) -> None:
    algorithm = ALGORITHMS["DANN"].build(replace(problem, sizes={"mlp_width": 8, "mlp_depth": 3}))
    state = algorithm.init(0)
    assert state["discriminator"].shape == (6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3,)
    n = min(len(state["params"]), len(state["discriminator"]))
    correlation = torch.corrcoef(torch.stack([state["params"][:n], state["discriminator"][:n]]))[0, 1]
    assert abs(correlation) < 0.3


WEIGHTS = {"cnt_lambda": 0.3, "dclf_lambda": 0.8, "disc_lambda": 0.6, "rmxd_lambda": 0.7}


def naive_contrast(z: Tensor, y: list[int]) -> Tensor:
    unit, total, n = z / z.norm(dim=1, keepdim=True), torch.zeros(()), 0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        if not positives:
            continue
        scaled = {j: 0.5 * torch.exp(unit[i].dot(unit[j]) / 0.07) for j in others}
        below = torch.stack([*scaled.values()]).sum() + 1e-5
        total = total + torch.stack([-torch.log(scaled[j] / below + 1e-5) for j in positives]).mean()
        n += 1
    return total / (n + 1)


def naive_remix(head: nn.Module, b: Tensor, c: Tensor, batch: EnvBatch, key: Tensor) -> Tensor:
    y, noise = batch.y.flatten().tolist(), random.uniform(random.fold(batch.example_keys.flatten(), key)).tolist()
    total = torch.zeros(())
    for label in range(4):
        members = sorted((i for i in range(len(y)) if y[i] == label), key=noise.__getitem__)
        if len(members) >= 2:
            i, j = members[:2]
            total = total + F.cross_entropy(head((c[i] + b[j]).unsqueeze(0)), torch.tensor([label]))
    return total / 4


def naive_head(n_out: int) -> nn.Sequential:
    half, quarter = max(3, n_out), max(1, n_out)
    return nn.Sequential(
        nn.Linear(6, half), nn.ReLU(), nn.Linear(half, quarter), nn.ReLU(), nn.Linear(quarter, n_out)
    ).double()


def test_adrmx_trains_like_modules(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    sized = Problem(
        problem.featurizer, 3, problem.n_classes, problem.input_shape, sizes={"mlp_width": 8, "mlp_depth": 3}
    )
    hparams = hparams_of("ADRMX", lr=3e-3, d_steps_per_g_step=2, **WEIGHTS)
    losses, state = train("ADRMX", batches, hparams, problem=sized)

    start = train("ADRMX", [], hparams, problem=sized)[1]
    classifier = nn.Linear(6, 4)
    nets: list[Any] = [problem.featurizer().double() for _ in range(2)]
    for net, name in zip(nets, ("params", "domain"), strict=True):
        n = sum(p.numel() for p in net.parameters())
        vector_to_parameters(start[name][:n].clone(), net.parameters())
        assert len(start[name]) == n + sum(p.numel() for p in classifier.parameters())
    h1, h2, hd = (naive_head(n) for n in (4, 4, 3))
    heads = nn.ModuleList([h1, h2, hd])
    vector_to_parameters(start["heads"].clone(), heads.parameters())
    judge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    vector_to_parameters(start["discriminator"].clone(), judge.parameters())
    rest = [*nets[0].parameters(), *nets[1].parameters(), *heads.parameters()]
    optimizer = torch.optim.Adam(rest, lr=3e-3, betas=(0.5, 0.9))
    its_optimizer = torch.optim.Adam(judge.parameters(), lr=3e-3, betas=(0.5, 0.9))
    e = torch.arange(3).repeat_interleave(7)
    for step, batch in enumerate(batches):
        a, b = (net(batch.x.flatten(0, 1)) for net in nets)
        c = a - b
        confusion = F.cross_entropy(judge(c), e)
        y = batch.y.flatten()
        loss = F.cross_entropy(h1(a), y) + F.cross_entropy(h2(c), y) + 0.8 * F.cross_entropy(hd(b), e)
        loss = loss + 0.7 * naive_remix(h1, b, c, batch, random.fold(random.key_of(5), step))
        labels = y.tolist()
        loss = loss + 0.3 * (naive_contrast(a, labels) + naive_contrast(c, labels))
        for some in (optimizer, its_optimizer):
            some.zero_grad()
        if (step + 1) % 3 < 2:
            confusion.backward()  # type: ignore[no-untyped-call]
            its_optimizer.step()
        else:
            (loss - 0.6 * confusion).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-7), f"loss at step {step}"
    found = state["params"][: sum(p.numel() for p in nets[0].parameters())]
    torch.testing.assert_close(found, parameters_to_vector(nets[0].parameters()).detach(), rtol=1e-6, atol=1e-8)
    expected = parameters_to_vector(judge.parameters()).detach()
    torch.testing.assert_close(state["discriminator"], expected, rtol=1e-6, atol=1e-8)
    logits = ALGORITHMS["ADRMX"].build(sized).predict(state, batches[0].x[0])
    torch.testing.assert_close(logits, h1(nets[0](batches[0].x[0])).detach(), rtol=1e-6, atol=1e-7)


def test_the_contrast_of_few_examples_apart() -> None:
    """At 120 degrees the small constants count; the example that is alone in its class has no positives."""
    angles = torch.tensor([0.0, 120.0, 240.0, 90.0], dtype=torch.float64).deg2rad()
    z, y = 3 * torch.stack([angles.cos(), angles.sin()], -1), [1, 1, 1, 0]
    for chosen in ([0, 1, 2], [0, 1, 3], [0, 1, 2, 3], [0, 3]):
        labels = [y[i] for i in chosen]
        batch = make_batch(z[chosen].unsqueeze(0), torch.tensor([labels]), random.key_of(0))
        expected = naive_contrast(z[chosen], labels).to(z.dtype)
        torch.testing.assert_close(contrast(z[chosen], batch), expected, rtol=1e-9, atol=0)


def test_pairs_are_of_one_class_and_a_class_needs_two() -> None:
    y = torch.tensor([[0, 1, 0, 2, 1], [1, 1, 0, 0, 3]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 0.0]])
    batch, seen = make_batch(torch.zeros(2, 5, 1), y, random.key_of(0), weight), set()
    for seed in range(40):
        first, second, counts = pairs_of_classes(batch, 4, random.key_of(seed))
        assert counts.tolist() == [True, True, False, False]
        for label in (0, 1):
            assert y.flatten()[first[label]] == y.flatten()[second[label]] == label
            seen.add((first[label].item(), second[label].item()))
    members = ([0, 2, 8], [1, 4, 5, 6])  # without padding
    assert seen == {(i, j) for some in members for i in some for j in some if i != j}


def test_heads_halve_the_width_twice() -> None:
    layers = [m for m in NonlinearHeads(40, 3, 12).heads["domain"] if isinstance(m, nn.Linear)]  # type: ignore[attr-defined]
    assert [(m.in_features, m.out_features) for m in layers] == [(40, 20), (20, 12), (12, 12)]
    layers = [m for m in NonlinearHeads(40, 3, 12).heads["label"] if isinstance(m, nn.Linear)]  # type: ignore[attr-defined]
    assert [m.out_features for m in layers] == [20, 10, 3]
