import warnings
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sandmask._physical import has_kernels, is_traced
from sandmask.algorithms import ALGORITHMS, Composed, MaskedAlgorithm, Problem, State
from sandmask.functional import Autograd, compiling, make_batch, random
from sandmask.functional.compiling import Compiled, Traced
from sandmask.gradients import ApartPass, OnePass
from sandmask.hparams import Hparam
from sandmask.networks import build_featurizer
from sandmask.training import one_pass
from sandmask.training.one_pass import one_pass_gradients
from sandmask.training.stack_step import looped_step, stacked_step

SHAPE = (3, 32, 32)
COMPILE = torch.compile


@pytest.fixture(autouse=True)
def _record_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded runs without being compiled, which takes minutes on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compiling, "_kept", deque())


def masked(name: str = "SANDMask", network: str = "test_resnet.r160_in1k", **values: float) -> tuple[Any, ...]:
    build = build_featurizer(network, SHAPE, {}, "none")
    algorithm = ALGORITHMS[name].build(Problem(build, 2, 3, SHAPE, differentiate=Autograd(), dropout=True))
    assert isinstance(algorithm, MaskedAlgorithm | Composed)
    rows = {row.name: row.default for row in ALGORITHMS[name].hparams if isinstance(row, Hparam)}
    values = {**rows, "tau": 0.3, "lr": 1e-2, "weight_decay": 0.0, "dropout": 0.1, **values}
    hparams = {name: torch.tensor(float(value)) for name, value in values.items()}
    return algorithm, algorithm.init(0), batch(0), hparams, random.key_of(1)


def batch(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, *SHAPE, generator=generator), torch.randint(3, (2, 4), generator=generator)
    return make_batch(x, y, random.key_of(seed))


@pytest.mark.parametrize("name", ["SANDMask", "SANDMask+VREx"])
def test_a_recorded_pass_follows_its_arguments(name: str) -> None:
    """Of a second batch, other parameters, another rate of dropout and another step of the schedule."""
    algorithm, state, first, hparams, key = masked(name)
    traced = Traced(lambda *args: one_pass_gradients(algorithm, *args))
    for number in range(2):
        params = algorithm.network.unflatten(state["params"])
        arguments = (params, state, first if number == 0 else batch(1), hparams, key)
        expected = one_pass_gradients(algorithm, *arguments)
        for one, other in zip(pytree.tree_leaves(traced(*arguments)), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(one, other)
            assert not one.requires_grad
        state = {**state, "params": state["params"] * 1.1, "step": state["step"] + 1000}
        hparams = {**hparams, "dropout": torch.tensor(0.4)}
    assert len(traced._programs) == 1


def test_other_shapes_are_recorded_anew() -> None:
    double = Traced(lambda tree: {"twice": 2 * tree["x"]})
    for shape in ((2,), (3,), (2,)):
        assert torch.equal(double({"x": torch.ones(shape)})["twice"], torch.full(shape, 2.0))
    assert len(double._programs) == 2


def test_more_batch_sizes_than_torch_compiles_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of a sweep have many batch sizes; after the limit, torch would run the network eagerly."""
    sizes: list[int] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        sizes.append(len(inputs[0]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    double = Compiled(lambda x: 2 * x)
    limit = torch._dynamo.config.recompile_limit
    for size in range(2, limit + 4):
        torch.testing.assert_close(double(torch.ones(size)), torch.full((size,), 2.0))
    assert sizes == [*range(2, limit + 4)]
    assert torch._dynamo.config.recompile_limit == limit


def test_runs_of_one_kind_share_a_compiled_program() -> None:
    """A sweep's runs differ in numbers that the program is given, so only the first of a process is compiled."""
    programs = []
    for tau in (0.3, 0.9):
        algorithm, state, first, hparams, key = masked(tau=tau)
        traced = Traced(partial(one_pass_gradients, algorithm))
        arguments = (algorithm.network.unflatten(state["params"]), state, first, hparams, key)
        found, expected = traced(*arguments), one_pass_gradients(algorithm, *arguments)
        for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(one, other)
        programs.append(traced._programs[0][1][0])
    assert programs[0] is programs[1]


def test_programs_with_other_constants_are_not_shared() -> None:
    constants = [torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([2.0], dtype=torch.float64), torch.tensor([2])]
    for constant in constants:
        found = Traced(lambda x, constant=constant: x * constant)(torch.ones(1))
        assert (found.item(), found.dtype) == (constant.item(), (torch.ones(1) * constant).dtype)
    assert len(compiling._kept) == len(constants)


def test_gradients_inside_of_what_is_recorded() -> None:
    def slope(x: Tensor) -> Tensor:
        assert is_traced()
        assert not has_kernels(x)
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((leaf**3).sum(), leaf)
        return found

    with torch.no_grad():
        assert Traced(slope)(torch.tensor([1.0, 2.0])).tolist() == [3.0, 12.0]
    assert not is_traced()


def compiled_step(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The step of a compiled network as on a GPU."""
    monkeypatch.setattr(one_pass, "compiles_passes", lambda _: True)
    algorithm.network.compile()
    return looped_step(algorithm)


def leading(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.unsqueeze(0), tree)


def test_pieces_of_shared_and_unused_parameters() -> None:
    """Against the stacked gradients of `OnePass`, of a convolution that is used twice and a layer that is not used."""
    shapes = {"kernel": (2, 2, 1, 1), "weight": (3, 8), "unused": (4,)}
    params = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
    x = torch.randn(6, 2, 2, 2)

    def passed(tape: OnePass) -> OnePass:
        with tape:
            y = torch.conv2d(torch.conv2d(x, params["kernel"]).relu(), params["kernel"])
            value = F.linear(y.flatten(1), params["weight"]).square().sum()
        tape.run(value, list(params.values()))
        return tape

    expected, apart = passed(OnePass(params, [4, 2])).gradients(), passed(ApartPass(params, [4, 2]))
    assert isinstance(apart, ApartPass)
    assert apart.pieces().keys() == expected.keys()
    for name, pieces in apart.pieces().items():
        assert torch.equal(torch.stack(list(pieces)), expected[name])


@pytest.mark.parametrize("rescale", [0, 1])
def test_a_step_of_a_compiled_network_is_that_of_the_network(rescale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, *arguments = masked(rescale=rescale)
    expected: tuple[State, Any] = looped_step(algorithm)(*leading(arguments))
    step = compiled_step(algorithm, monkeypatch)
    monkeypatch.setattr(algorithm, "step", None)  # what it falls back to
    found = step(*leading(arguments))
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_share_a_pass_takes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, *arguments = masked()
    expected = algorithm.step(*arguments)
    monkeypatch.setattr(one_pass, "AT_ONCE_BYTES", 0)
    step = compiled_step(algorithm, monkeypatch)
    for _ in range(2):
        state, metrics = step(*leading(arguments))
        torch.testing.assert_close(state["params"][0], expected[0]["params"])
        torch.testing.assert_close(metrics["loss"][0], expected[1]["loss"])


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def failing(*_: Any, **__: Any) -> Any:
        def run(*_: Any) -> Any:
            raise BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

        return run

    monkeypatch.setattr(torch, "compile", failing)
    twice = Traced(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="torch.compile failed"):
        assert twice(torch.ones(())).item() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twice(torch.ones(())).item() == 2


def test_a_network_whose_layers_fold_no_moments_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stacked step of one run then takes the same recorded pass at each step, as of a small network of one's own."""
    algorithm, state, _, hparams, key = masked(network="mnist-convnet")
    recorded = []

    def counted(self: Traced, *args: Any) -> Any:
        recorded.append(self)
        return trace(self, *args)

    trace = Traced._trace
    monkeypatch.setattr(Traced, "_trace", counted)
    monkeypatch.setattr(one_pass, "compiles_passes", lambda _: True)
    algorithm.network.compile()
    step = stacked_step(algorithm)
    assert step is not None
    states = leading(state)
    for number in range(3):
        expected = algorithm.step(pytree.tree_map(lambda t: t[0], states), batch(number), hparams, key)
        states, metrics = step(states, *leading((batch(number), hparams, key)))
        torch.testing.assert_close(metrics["loss"][0], expected[1]["loss"])
    assert len(recorded) == 1


def test_a_step_that_takes_numbers_out_of_tensors_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be constants of the program; it takes one pass after the other instead, and says so once."""
    algorithm, state, first, hparams, key = masked()
    plain = algorithm.risks
    monkeypatch.setattr(algorithm, "risks", lambda *args: plain(*args) * (1.0 + args[1].x.mean().item()))
    expected = [algorithm.step(state, each, hparams, key)[1]["loss"] for each in (first, batch(1))]
    step = compiled_step(algorithm, monkeypatch)
    with pytest.warns(UserWarning, match="failed for a whole pass"):
        losses = [step(*leading((state, first, hparams, key)))[1]["loss"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.append(step(*leading((state, batch(1), hparams, key)))[1]["loss"])
    torch.testing.assert_close(torch.cat(losses), torch.stack(expected))
