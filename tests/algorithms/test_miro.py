"""MIRO against modules, hooks and PyTorch's Adam."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import EnvBatch, make_batch, random
from sandmask.networks import build_featurizer

MakeHparams = Callable[..., dict[str, Tensor]]

SHAPE = (3, 32, 32)
STAGES = ("act1", "layer1", "layer2", "layer3", "layer4")


def maps(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """What hooks see of the stages, and the features."""
    found: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: found.update({name: out}))
        for name in STAGES
    ]
    features = model(x)
    for hook in hooks:
        hook.remove()
    return [found[name] for name in STAGES], features


@pytest.fixture(scope="module")
def backbone() -> Problem:
    build = build_featurizer("test_resnet.r160_in1k", SHAPE, {}, "none")
    return Problem(build, 2, 3, SHAPE)


def test_trains_like_a_module_with_hooks(backbone: Problem, hparams_of: MakeHparams) -> None:
    algorithm = ALGORITHMS["MIRO"].build(backbone)
    hparams = hparams_of("MIRO", miro_lambda=0.7)
    state: State = algorithm.init(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        featurizer = backbone.featurizer()
    model = featurizer.model
    assert isinstance(model, nn.Module)
    head = nn.Linear(featurizer.n_features, 3)
    named = algorithm.network.named(state["params"])
    model.load_state_dict({k.removeprefix("featurizer.model."): v for k, v in named.items()}, strict=False)
    head.load_state_dict({"weight": named["classifier.weight"], "bias": named["classifier.bias"]})
    before = copy.deepcopy(model)
    stages = maps(model, torch.zeros(1, *SHAPE))[0]
    b = [nn.Parameter(torch.full((s.shape[1],), 0.1 - 1e-5).expm1().log()) for s in stages]
    groups: list[dict[str, Any]] = [{"params": [*model.parameters(), *head.parameters()]}, {"params": b, "lr": 3e-2}]
    optimizer = torch.optim.Adam(groups, lr=3e-3, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        x, y = torch.randn(2, 4, *SHAPE, generator=generator), torch.randint(3, (2, 4), generator=generator)
        f, features = maps(model, x.flatten(0, 1))
        with torch.no_grad():
            f0, _ = maps(before, x.flatten(0, 1))
        loss, penalty = F.cross_entropy(head(features), y.flatten()), torch.zeros(())
        for now, then, each in zip(f, f0, b, strict=True):
            v = (F.softplus(each) + 1e-5).view(1, -1, 1, 1).expand_as(now)
            penalty = penalty + (((now - then) ** 2 / v + v.log()) / 2).mean()
        optimizer.zero_grad()
        (loss + 0.7 * penalty).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        single = {name: value.float() for name, value in hparams.items()}
        state, metrics = algorithm.step(state, make_batch(x, y, random.key_of(step)), single, random.key_of(step))
        assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["penalty"].item() == pytest.approx(penalty.item(), rel=1e-4)
    torch.testing.assert_close(state["variances"], parameters_to_vector(b).detach(), rtol=1e-3, atol=1e-3)
    weight = algorithm.network.named(state["params"])["featurizer.model.layer4.0.conv1.weight"]
    torch.testing.assert_close(
        weight, dict(model.named_parameters())["layer4.0.conv1.weight"].detach(), rtol=0, atol=2e-3
    )


def test_a_network_without_stages_is_held_by_its_features(
    problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams
) -> None:
    """With a heavy weight, the features stay where they were; without, they go."""
    moved = []
    for weight in (0.0, 1e4):
        algorithm = ALGORITHMS["MIRO"].build(problem)
        state = algorithm.init(0)
        hparams = {name: value.float() for name, value in hparams_of("MIRO", miro_lambda=weight, lr=1e-2).items()}
        for step in range(20):
            batch = EnvBatch(*(t.float() if t.is_floating_point() else t for t in batches[step % len(batches)]))
            state, _ = algorithm.step(state, batch, hparams, random.key_of(step))
        now, then = (
            algorithm.network.features(algorithm.network.unflatten(state[entry]), batch.inputs)
            for entry in ("params", "start")
        )
        moved.append((now - then).norm().item())
    assert moved[1] < 0.3 * moved[0]
