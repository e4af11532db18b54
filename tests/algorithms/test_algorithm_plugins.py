"""Algorithms of a user: the example, objectives and masks."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import (
    ALGORITHMS,
    AlgorithmEntry,
    Hparams,
    LogMaskedAlgorithm,
    MaskedAlgorithm,
    ObjectiveAlgorithm,
    Problem,
    State,
    environment_risks,
)
from sandmask.datasets import DATASETS, load_dataset
from sandmask.errors import SandmaskError
from sandmask.functional import Autograd, Direct, EnvBatch, Functional, Params
from sandmask.hparams import FRACTION, Hparam, Uniform
from sandmask.masks import ANDMask, GeometricMean, Mask, MaskError
from sandmask.networks import MLP
from sandmask.plugins import load_plugins
from sandmask.training import RunFolder, make_spec, train_stack

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "my_method.py"


@pytest.fixture
def _example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loaded as `--plugin` does, and gone again after the test."""
    others = {key: entry for key, entry in ALGORITHMS._entries.items() if key != "softand"}
    monkeypatch.setattr(ALGORITHMS, "_entries", others)
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("sandmask_plugin")}
    load_plugins([EXAMPLE])
    yield
    for name in [name for name in sys.modules if name.startswith("sandmask_plugin")]:
        del sys.modules[name]
    sys.modules.update(loaded)


@pytest.mark.usefixtures("_example")
@pytest.mark.parametrize(
    ("power", "other", "values"), [(0.0, "ERM", {}), (200.0, "ANDMask", {"tau": 1.0})], ids=["ERM", "ANDMask"]
)
def test_the_ends_of_the_example_are_known_methods(
    power: float,
    other: str,
    values: dict[str, float],
    batches: list[EnvBatch],
    hparams_of: MakeHparams,
    train: Train,
) -> None:
    losses, state = train("SoftAND", batches, hparams_of("SoftAND", power=power))
    expected_losses, expected = train(other, batches, hparams_of(other, **values))
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    torch.testing.assert_close(state["params"], expected["params"], rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("_example")
def test_in_between_the_example_is_neither(batches: list[EnvBatch], hparams_of: MakeHparams, train: Train) -> None:
    ends = [train("SoftAND", batches, hparams_of("SoftAND", power=power))[1] for power in (0.0, 2.0, 200.0)]
    assert len({tuple(end["params"].tolist()) for end in ends}) == 3


class NoNumber(ObjectiveAlgorithm):
    """Forgets to take the mean over environments."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        return environment_risks(self.logits(params, batch, hparams), batch), {}


class NoSuchState(ObjectiveAlgorithm):
    """Keeps an average that it never began."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        risk = environment_risks(self.logits(params, batch, hparams), batch).mean()
        return risk, {"average": risk.detach()}


class NoState(ObjectiveAlgorithm):
    """Returns the value alone."""

    def objective(self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor) -> Any:
        return environment_risks(self.logits(params, batch, hparams), batch).mean()


class NoParameters(ObjectiveAlgorithm):
    """Minimizes something that does not depend on the parameters."""

    def objective(
        self, params: Params, state: State, batch: EnvBatch, hparams: Hparams, key: Tensor
    ) -> tuple[Tensor, State]:
        return self.risks(params, batch, hparams).mean().detach(), {}


class NoMask(MaskedAlgorithm):
    """Returns a number instead of a mask."""

    def mask(self, hparams: Hparams) -> Any:
        return 1.0


class NoObjective(ObjectiveAlgorithm):
    """Forgets its method."""


def test_a_class_without_its_method_is_refused_at_once() -> None:
    with pytest.raises(SandmaskError, match="NoObjective cannot be registered: it does not define objective"):
        AlgorithmEntry("NoObjective", "a test", "a test", NoObjective)


@pytest.mark.parametrize("n_runs", [1, 2])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoParameters, "The objective does not depend on the parameters"),
        (NoMask, "NoMask.mask should return a `Mask`. Found float"),
        (lambda _: None, "`build` of <lambda> should return an `Algorithm`. Found NoneType"),
        (NoNumber, "should return one number"),
        (NoSuchState, "Create them in `extra_state`"),
        (NoState, "it may be empty\\). Found Tensor"),
    ],
)
def test_mistakes_in_an_objective_are_named(
    kind: Any, message: str, n_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    ALGORITHMS.register(AlgorithmEntry(kind.__name__, "a test", "a test", kind))
    data, entry = load_dataset("DebugVector"), DATASETS["DebugVector"]
    specs = [make_spec(entry, kind.__name__, test_envs=[0], steps=2, seed=seed) for seed in range(n_runs)]
    with pytest.raises(SandmaskError, match=message):
        train_stack(specs, data, torch.device("cpu"), tmp_path / "stack.safetensors")


TAU = (Hparam("tau", 1.0, Uniform(0, 1), FRACTION),)


class Geometric(LogMaskedAlgorithm):
    """ILC's geometric mean."""

    def mask(self, hparams: Hparams) -> Mask:
        return GeometricMean(tau=hparams["tau"])


class WithoutLogs(MaskedAlgorithm):
    """The same mask, in a class that does not sum log-magnitudes."""

    def mask(self, hparams: Hparams) -> Mask:
        return GeometricMean(tau=hparams["tau"])


class Rescaled(MaskedAlgorithm):
    """A mask that asks to be rescaled."""

    def mask(self, hparams: Hparams) -> Mask:
        return ANDMask(tau=hparams["tau"], rescale="sparsity")


@pytest.fixture
def _masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    for kind in (Geometric, WithoutLogs, Rescaled):
        ALGORITHMS.register(AlgorithmEntry(kind.__name__, "a test", "a test", kind, TAU))


def by_hand(model: nn.ModuleDict, batch: EnvBatch, tau: float) -> Tensor:
    """The geometric mean of the environments' gradients, masked, as one vector."""
    params = list(model.parameters())
    rows = []
    for x, y in zip(batch.x, batch.y, strict=True):
        loss = nn.functional.cross_entropy(model["classifier"](model["featurizer"](x)), y)
        rows.append(parameters_to_vector(torch.autograd.grad(loss, params)))
    g = torch.stack(rows)
    agreed = g.sign().mean(0).abs() >= tau - 1e-9
    return agreed * g.mean(0).sign() * (g.abs() + 1e-10).log().mean(0).exp()


@pytest.mark.usefixtures("_masked")
@pytest.mark.parametrize("differentiate", [Functional(), Direct(), Autograd()], ids=lambda way: type(way).__name__)
def test_a_geometric_mean_is_the_formula(
    differentiate: Any, problem: Problem, batches: list[EnvBatch], hparams_of: Any, train: Any
) -> None:
    problem = problem.with_differentiator(differentiate)
    hparams = hparams_of("Geometric", tau=0.3)
    _, state = train("Geometric", batches, hparams, problem=problem)
    model = nn.ModuleDict({"featurizer": MLP(5, width=8, depth=3, n_outputs=6), "classifier": nn.Linear(6, 4)}).double()
    vector_to_parameters(ALGORITHMS["Geometric"].build(problem).init(5)["params"].double(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=hparams["lr"].item(), weight_decay=1e-2)
    for batch in batches:
        pieces = torch.split(by_hand(model, batch, 0.3), [p.numel() for p in model.parameters()])
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
    torch.testing.assert_close(state["params"], parameters_to_vector(model.parameters()).detach())


def specs_of(name: str) -> list[Any]:
    entry = DATASETS["DebugVector"]
    return [
        make_spec(entry, name, test_envs=[0], steps=6, checkpoint_every=5, seed=seed, hparams={"tau": tau})
        for seed, tau in enumerate((0.0, 0.4))
    ]


@pytest.mark.usefixtures("_masked")
def test_a_geometric_mean_trains_alone_stacked_and_with_diagnostics(tmp_path: Path) -> None:
    data, cpu = load_dataset("DebugVector"), torch.device("cpu")
    specs = specs_of("Geometric")
    stacked = train_stack(specs, data, cpu, tmp_path / "stack.safetensors", diagnostics=True)
    for spec, record in zip(specs, stacked, strict=True):
        assert "held_out_mask_density" in record.metrics
        alone = RunFolder(tmp_path / spec.id).train(spec, data, cpu)
        assert abs(alone.metrics["loss"] - record.metrics["loss"]).max() < 1e-5


@pytest.mark.usefixtures("_masked")
def test_without_log_magnitudes_the_error_says_what_to_derive_from(tmp_path: Path) -> None:
    data, cpu = load_dataset("DebugVector"), torch.device("cpu")
    for specs in (specs_of("WithoutLogs"), specs_of("WithoutLogs")[:1]):
        with pytest.raises(MaskError, match=r"Derive WithoutLogs from `[a-z.]+LogMaskedAlgorithm`"):
            train_stack(specs, data, cpu, tmp_path / "stack.safetensors")


@pytest.mark.usefixtures("_masked")
def test_a_mask_that_asks_to_be_rescaled_is(batches: list[EnvBatch], hparams_of: Any, train: Any) -> None:
    states: list[State] = [
        train(name, batches, hparams_of(name, tau=1.0))[1] for name in ("Rescaled", "ANDMask-rescaled", "ANDMask")
    ]
    assert torch.equal(states[0]["params"], states[1]["params"])
    assert not torch.equal(states[0]["params"], states[2]["params"])
