"""Networks of one's own: what is refused, what is stacked, and that they train like ours."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from sandmask.datasets import DATASETS, TensorDataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.networks import NETWORKS, Network, NetworkEntry, build_featurizer, inspect_module
from sandmask.plugins import load_plugins
from sandmask.records import RunSpec
from sandmask.training import RunFolder, Stack, load_run, make_spec
from sandmask.training.specs import trains_alone

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "tiny_transformer.py"
CPU = torch.device("cpu")
SHAPE = (6, 4)


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What tests register is gone after them."""
    for registry in (NETWORKS, DATASETS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
    for name in [name for name in sys.modules if name.startswith("sandmask_plugin")]:
        del sys.modules[name]
    torch.backends.mha.set_fastpath_enabled(True)


def register(build: Callable[..., nn.Module], name: str = "mine", *, stacks: bool = True) -> None:
    NETWORKS.register(NetworkEntry(name, "a test", build, stacks))


class Always(nn.Module):
    """A module whose forward is a function of the layer and the input."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x.flatten(1))


class Doubled(torch.autograd.Function):
    """The identity, which `vmap` doubles."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
        return 2 * x, in_dims[0]


def doubled_features(layer: nn.Linear, x: Tensor) -> Tensor:
    features: Tensor = Doubled.apply(layer(x))  # type: ignore[no-untyped-call]
    return features.square()


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        features: Tensor = self.layer(x.flatten(1))
        return features


def with_tensor() -> nn.Module:
    module = Always(lambda layer, x: layer(x))
    module.scale = torch.ones(8)
    return module


class Hidden(nn.Module):
    """Uses its second layer in a checkpoint, or the weight of it from a list."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 8), nn.Linear(8, 8)
        self.kept = [self.second.weight] if listed else []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).tanh()
        if self.kept:
            return F.linear(x, self.kept[0])
        features: Tensor = checkpoint(self.second, x, use_reentrant=False)
        return features


def attention(*, batch_first: bool, bias: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first, bias=bias)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 8)),
            "layer '1' is a BatchNorm1d.*GroupN",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24, track_running_stats=False), nn.Linear(24, 8)),
            "mixes the examples of every batch",
        ),
        (lambda: attention(batch_first=False), "mixes the examples.*batch_first=True"),
        (lambda: Always(lambda layer, x: layer(x) - layer(x).mean(0)), "mixes the examples"),
        (lambda: Always(lambda layer, x: F.dropout(layer(x), 0.5)), "random in evaluation.*training=self.training"),
        (Counting, "changes its buffer 'calls'"),
        (with_tensor, r"tensor 'scale' would stay on the CPU. Use register_buffer\('scale'"),
        (lambda: Hidden(listed=True), "uses parameters other than as attributes.*nn.ParameterList"),
        (lambda: Hidden(listed=False), "cannot be differentiated.*`torch.utils.checkpoint`"),
        (lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(24, 8))), "differentiated.*scripted modules"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), "lazy layers"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 8)).double(), "type torch.float64"),
        (nn.Flatten, "no parameters to train"),
        (lambda: nn.Linear(4, 8), r"\[N, 6, 4\] to features \[N, F\].* gave \[4, 6, 8\]"),
        (lambda: nn.Linear(5, 8), r"fails on inputs \[N, 6, 4\] of zeros and ones: RuntimeError"),
        (lambda: "a module", "should return an nn.Module. Found str"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_would_be_wrong_is_refused_in_one_line(build: Callable[[], nn.Module], message: str) -> None:
    register(lambda _: build())
    with pytest.raises(SandmaskError, match=message) as caught:
        build_featurizer("mine", SHAPE, {})
    assert "\n" not in str(caught.value)
    assert "'mine'" in str(caught.value)


@pytest.mark.parametrize(("statistic", "value"), [("running_mean", 0.5), ("running_var", 2.0)])
def test_trained_statistics_are_frozen(statistic: str, value: float) -> None:
    def build(_: object) -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 8))
        getattr(module[1], statistic).fill_(value)
        return module

    register(build)
    network = Network(build_featurizer("mine", SHAPE, {}), 3)
    params = network.unflatten(network.init(0))
    x = torch.rand(5, *SHAPE)
    torch.testing.assert_close(network.logits(params, x)[:1], network.logits(params, x[:1]))


def test_the_first_parameters_are_those_of_torch() -> None:
    register(lambda shape: nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], 8)))
    network = Network(build_featurizer("Mine", SHAPE, {}), 3)
    torch.manual_seed(5)
    expected = nn.Linear(24, 8), nn.Linear(8, 3)
    found = network.named(network.init(5))
    assert torch.equal(found["featurizer.model.1.weight"], expected[0].weight)
    assert torch.equal(found["classifier.weight"], expected[1].weight)


def test_hyperparameters_are_passed_by_name() -> None:
    register(lambda _, mlp_width: nn.Sequential(nn.Flatten(), nn.Linear(24, mlp_width)))
    assert Network(build_featurizer("mine", SHAPE, {"mlp_width": 7, "mlp_depth": 3}), 2).n_features == 7
    with pytest.raises(SandmaskError, match="The network mine needs mlp_width"):
        build_featurizer("mine", SHAPE, {})
    with pytest.raises(SandmaskError, match="takes no file"):
        build_featurizer("mine", SHAPE, {"mlp_width": 7}, "weights.pth")


def test_a_function_may_take_any_arguments() -> None:
    register(lambda shape, *_, **options: nn.Sequential(nn.Flatten(), nn.Linear(24, 5 + len(options))))
    assert Network(build_featurizer("mine", SHAPE, {"mlp_width": 7}), 2).n_features == 5


@pytest.mark.parametrize(
    ("module", "why_not"),
    [
        (attention(batch_first=True), ""),
        (nn.Sequential(nn.Conv1d(6, 3, 2), nn.Flatten()), "convolutions"),
        (
            Always(lambda layer, x: layer(x) * (1.0 if float(layer.weight.sum()) > -99 else 0.0)),
            "vmap does not take it",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(24, 50_000)), "a million parameters"),
        (Always(doubled_features), "are not those of single runs"),
    ],
)
def test_what_stacks(module: nn.Module, why_not: str) -> None:
    report = inspect_module("mine", module, SHAPE)
    assert why_not in report.why_not_stacked
    assert report.stacks == (not why_not)
    assert not inspect_module("mine", module, SHAPE, stacks=False).stacks


def dataset() -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    parts = [(torch.randn(20, *SHAPE, generator=draws), torch.arange(20) % 2) for _ in range(3)]
    return TensorDataset("Mine", ("a", "b", "c"), ("no", "yes"), parts)


def specs(algorithm: str = "ERM", **own: float) -> list[RunSpec]:
    values = {"batch_size": 4, "lr": 0.001, **own}
    return [
        make_spec(DATASETS["DebugVector"], algorithm, [2], steps=3, hparams=values, seed=seed, network="mine")
        for seed in (0, 1)
    ]


@pytest.mark.parametrize("stacks", [True, False])
def test_stacked_runs_are_those_alone(stacks: bool, caplog: pytest.LogCaptureFixture) -> None:
    register(lambda _: attention(batch_first=True) if stacks else nn.Sequential(nn.Conv1d(6, 3, 2), nn.Flatten()))

    def trained(some: list[RunSpec]) -> Tensor:
        stack = Stack(some, dataset(), CPU)
        assert stack.stacks == stacks
        state = stack.init()
        for batch, _ in zip(stack.feed(0), range(3), strict=False):
            state, _metrics = stack.step(state, batch)
        # Not the parameters: the bias of attention's keys has no effect, and its gradient is rounding alone.
        predict = stack.algorithm.predict
        return torch.stack([predict({"params": each}, dataset().inputs(torch.arange(60))) for each in state["params"]])

    both = specs()
    together = trained(both)
    assert ("convolutions" in caplog.text) == (not stacks)
    for run, spec in enumerate(both):
        torch.testing.assert_close(together[run], trained([spec])[0], rtol=1e-4, atol=1e-5)
    assert not trains_alone(both[0])


def in_float64(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


@pytest.mark.parametrize(("bias", "rescale"), [(True, 0), (False, 1)])
def test_masks_on_attention_differ_in_stacks_by_rounding_alone(bias: bool, rescale: int) -> None:
    """The bias of attention's keys has a gradient of zero, rounded: its signs must not count in a density."""
    register(lambda _: attention(batch_first=True, bias=bias))

    def trained(some: list[RunSpec]) -> Tensor:
        stack = Stack(some, dataset(), CPU)
        stack.hparams = in_float64(stack.hparams)
        state = in_float64(stack.init())
        for batch, _ in zip(stack.feed(0), range(3), strict=False):
            state, _metrics = stack.step(state, in_float64(batch))
        x = in_float64(dataset().inputs(torch.arange(60)))
        return torch.stack([stack.algorithm.predict({"params": each}, x) for each in state["params"]])

    both = specs("SANDMask", rescale=rescale)
    torch.testing.assert_close(trained(both), torch.cat([trained([spec]) for spec in both]), rtol=0, atol=1e-12)


def test_indices_are_not_rounded() -> None:
    load_plugins([EXAMPLE])
    spec = make_spec(DATASETS["Opinions"], "ERM", [3], steps=1, hparams={"batch_size": 2}, precision="bf16")
    with pytest.raises(SandmaskError, match="tiny-transformer uses its inputs as indices, which --precision bf16"):
        Stack([spec], load_dataset("Opinions"), CPU)


def test_the_example_trains_stacks_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins([EXAMPLE])
    data = load_dataset("Opinions")
    spec = make_spec(DATASETS["Opinions"], "ERM", [3], steps=2, hparams={"batch_size": 4}, network="TINY_transformer")
    assert (spec.network, spec.weights) == ("tiny-transformer", "none")
    assert Stack([spec], data, CPU).stacks
    RunFolder(tmp_path).train(spec, data, CPU)
    run = load_run(tmp_path)
    x = data.inputs(torch.arange(5))
    torch.testing.assert_close(run.module()(x), run.logits(x))
    assert "tiny-transformer" in NETWORKS
    monkeypatch.setattr(NETWORKS, "_entries", {k: v for k, v in NETWORKS._entries.items() if k != "tinytransformer"})
    with pytest.raises(SandmaskError, match=r"Unknown network 'tiny-transformer'.*--plugin FILE"):
        load_run(tmp_path)
