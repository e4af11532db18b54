"""Compositions: masks and sharpness on the gradients of objectives, against modules that are copied for real."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Composed, Hparams, MaskedAlgorithm, ObjectiveAlgorithm, Problem, State
from sandmask.errors import SandmaskError
from sandmask.functional import Autograd, EnvBatch, random
from sandmask.functional.flat import Params
from sandmask.masks import Mask
from sandmask.registry import checked_parts

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]

OBJECTIVES = [
    entry.name
    for entry in ALGORITHMS.values()
    if entry.kind == "objective" and getattr(entry.build, "by_environment", False)
]


class NoMask(MaskedAlgorithm):
    """The mean gradient."""

    def mask(self, hparams: dict[str, Tensor]) -> Mask:  # type: ignore[override]
        raise AssertionError

    def direction(
        self, state: State, gradients: Tensor, hparams: object, key: Tensor
    ) -> tuple[Tensor, State, dict[str, Tensor]]:
        del state, hparams, key
        self.seen = gradients
        return gradients.mean(0), {}, {}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("way", [None, Autograd()], ids=["functional", "autograd"])
def test_the_shares_of_the_environments_sum_to_the_gradient(
    name: str, way: Autograd | None, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams
) -> None:
    problem = problem if way is None else problem.with_differentiator(way)
    early = {row.name: 0 for row in ALGORITHMS[name].hparams if row.name.endswith("iters")}
    hparams = hparams_of(name, **early)
    build = ALGORITHMS[name].build
    alone = build(problem)
    assert isinstance(alone, ObjectiveAlgorithm)
    rule = NoMask(problem)
    composed = Composed(build(problem), rule, None)  # type: ignore[arg-type]
    state = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in alone.init(5).items()}
    key = random.key_of(1)
    one, metrics = alone.step(state, batches[0], hparams, key)
    other, of_composed = composed.step(state, batches[0], hparams, key)
    torch.testing.assert_close(other["params"], one["params"], rtol=1e-9, atol=1e-9)
    assert of_composed["loss"].item() == pytest.approx(metrics["loss"].item(), rel=1e-9)
    assert rule.seen.shape == (problem.n_envs, composed.network.numel)
    assert (rule.seen[0] - rule.seen[1]).abs().max() > 1e-6  # each environment has a share of its own


def vrex_copies(model: nn.Module, batch: EnvBatch, weight: float) -> tuple[list[Tensor], float]:
    """The gradients of VREx by E copies of a model, times E: what environment e's examples do to it."""
    copies = [copy.deepcopy(model) for _ in batch.x]
    risks = torch.stack([F.cross_entropy(m(x), y) for m, x, y in zip(copies, batch.x, batch.y, strict=True)])
    loss = risks.mean() + weight * risks.var(unbiased=False)
    (len(copies) * loss).backward()  # type: ignore[no-untyped-call]
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in copies]
    return gradients, loss.item()


def sand(gradients: list[Tensor], tau: float) -> Tensor:
    stacked = torch.stack(gradients)
    mean = stacked.mean(0)
    dispersion = stacked.var(0) / mean.square()
    return torch.tanh((stacked.sign().mean(0).abs() - tau) / dispersion).nan_to_num().clamp_min(0.0) * mean


@pytest.mark.parametrize("name", ["SANDMask+VREx", "SAM+SANDMask+VREx"])
def test_trains_like_copies_of_a_module(
    name: str, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    tau, rho, weight = 0.2, 0.1, 3.0
    values = {"tau": tau, "vrex_lambda": weight, "vrex_penalty_anneal_iters": 2}
    values |= {"rho": rho} if "SAM" in name else {}
    losses, state = train(name, batches, hparams_of(name, **values))
    featurizer = problem.featurizer()
    model = nn.Sequential(featurizer, nn.Linear(featurizer.n_features, problem.n_classes)).double()
    vector_to_parameters(train(name, [], hparams_of(name))[1]["params"].clone(), model.parameters())
    for step, batch in enumerate(batches):
        if step in (0, 2):
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
        now = weight if step >= 2 else 1.0
        gradients, loss = vrex_copies(model, batch, now)
        update = sand(gradients, tau)
        if "SAM+" in name:
            here = parameters_to_vector(model.parameters()).detach().clone()
            vector_to_parameters(here + rho * update / update.norm(), model.parameters())
            update = sand(vrex_copies(model, batch, now)[0], tau)
            vector_to_parameters(here, model.parameters())
        pieces = torch.split(update, [p.numel() for p in model.parameters()])
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
        assert losses[step] == pytest.approx(loss, rel=1e-9)
    torch.testing.assert_close(state["params"], parameters_to_vector(model.parameters()).detach(), rtol=1e-7, atol=1e-9)


def test_a_rule_on_the_risks_alone_is_the_rule(problem: Problem, batches: list[EnvBatch], train: Train) -> None:
    hparams = {"lr": 3e-3, "weight_decay": 1e-2, "dropout": 0.3, "tau": 0.3}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in hparams.items()}
    alone, state = train("ANDMask", batches, tensors)
    erm, mask = ALGORITHMS["ERM"].build(problem), ALGORITHMS["ANDMask"].build(problem)
    composed = Composed(erm, mask, None)  # type: ignore[arg-type]
    same = train("ANDMask", [], tensors)[1]
    for step, batch in enumerate(batches):
        same, metrics = composed.step(same, batch, tensors, random.fold(random.key_of(5), step))
        assert metrics["loss"].item() == pytest.approx(alone[step])
        assert "mask_density" in metrics
    torch.testing.assert_close(same["params"], state["params"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ERM+", "+ERM", "SAM+ +VREx", "+"])
def test_a_missing_name_is_told_as_one(name: str) -> None:
    for look_up in (ALGORITHMS.__getitem__, checked_parts):
        with pytest.raises(SandmaskError, match=r"lacks a name before or after a '\+'"):
            look_up(name)
    assert name not in ALGORITHMS


def test_names_resolve_in_any_order_and_spelling() -> None:
    assert {ALGORITHMS[name].name for name in ("SANDMask+VREx", "vrex + sand-mask", "VREX+sandmask")} == {
        "SANDMask+VREx"
    }
    assert ALGORITHMS["irm+and_mask+sam"].name == "SAM+ANDMask+IRM"
    assert ALGORITHMS["SAM+ERM"] is ALGORITHMS["SAM"]
    assert ALGORITHMS["erm++"] is ALGORITHMS["ERMPlusPlus"]
    assert "SANDMask+VREx" in ALGORITHMS
    assert "SANDMask+Nothing" not in ALGORITHMS
    assert "SANDMask+VREx" not in list(ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Fish+VREx", "Fish is neither an objective nor a rule"),
        ("SAM+GSAM", "SAM and GSAM are both sharpness-aware methods"),
        ("ANDMask+PCGrad+IRM", "ANDMask and PCGrad are both rules"),
        ("CORAL+VREx", "CORAL and VREx are both objectives"),
        ("SANDMask+IGA", "IGA's gradient cannot be split by environment"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(SandmaskError) as error:
        ALGORITHMS[name]
    assert reason in str(error.value)
    assert "SAGM" in str(error.value)
    assert "GroupDRO" in str(error.value)
    assert "\n" not in str(error.value)


def test_hyperparameters_are_those_of_the_parts_and_may_not_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    composed = {row.name for row in ALGORITHMS["SAM+SANDMask+VREx"].hparams}
    assert composed == {"rho", "tau", "rescale", "vrex_lambda", "vrex_penalty_anneal_iters"}
    assert ALGORITHMS["SANDMask+VREx"].caution({"tau": 1.0}) is not None
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    ALGORITHMS.register(replace(ALGORITHMS["VREx"], name="Other", hparams=ALGORITHMS["ANDMask"].hparams))
    with pytest.raises(SandmaskError, match="both have a hyperparameter"):
        ALGORITHMS["SANDMask+Other"]


def test_an_objective_that_reads_parameters_is_refused(problem: Problem, batches: list[EnvBatch]) -> None:
    class Decayed(ObjectiveAlgorithm):
        def objective(
            self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
        ) -> tuple[Tensor, State]:
            del state, key
            decay = torch.stack([p.square().sum() for p in params.values()]).sum()
            return self.logits(params, batch, hparams).mean() + decay, {}

    composed = Composed(Decayed(problem), ALGORITHMS["AgrSum"].build(problem), None)  # type: ignore[arg-type]
    values = {name: torch.tensor(0.1) for name in ("lr", "weight_decay", "dropout")}
    with pytest.raises(SandmaskError, match="reads parameters itself"):
        composed.step(composed.init(0), batches[0]._replace(x=batches[0].x.float()), values, random.key_of(0))
