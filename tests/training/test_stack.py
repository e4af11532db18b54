from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sandmask.algorithms import (
    ALGORITHMS,
    Composed,
    Hparams,
    MaskedAlgorithm,
    Problem,
    SANDMaskAlgorithm,
    State,
    environment_risks,
)
from sandmask.datasets import DATASETS, Dataset, TensorDataset, load_dataset
from sandmask.errors import SandmaskError
from sandmask.functional import Autograd, Direct, EnvBatch, Functional, Params, make_batch, random
from sandmask.hparams import Hparam
from sandmask.masks import TensorMoments
from sandmask.networks import Featurizer, build_featurizer
from sandmask.records import RunSpec
from sandmask.training import Stack, cuda_graph, make_spec, split_environment
from sandmask.training.cuda_graph import Carry, Program
from sandmask.training.stack import CACHED_ACTIVATIONS
from sandmask.training.stack_step import looped_step, moments_of_runs, stacked_step

Specs = Callable[..., RunSpec]


def train(stack: Stack) -> State:
    """Train in float64, so that a difference is a mistake and not a rounding that a mask's threshold blew up."""
    stack.hparams = double(stack.hparams)
    state: State = double(stack.init())
    for batch in stack.feed(0):
        state, _ = stack.step(state, double(batch))
    return state


def double(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, tree)


@pytest.mark.parametrize("algorithm", ["SANDMask+VREx", "ANDMask+CORAL", "SANDMask+MTL"])
def test_compositions_take_the_fast_path_of_masks(
    algorithm: str, dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec_of(algorithm, (k,), seed=k, hparams={"tau": 0.2, "lr": 0.003 * (k + 1)}) for k in range(2)]
    fast = Stack(specs, dataset, device)
    composed = fast.algorithm
    monkeypatch.setattr(composed, "step", None)  # the slow one, of which the next stack is
    state = train(fast)
    slow = Stack(specs, dataset, device)
    slow._step = torch.func.vmap(slow.algorithm.step)
    torch.testing.assert_close(state["params"], train(slow)["params"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["ANDMask+VREx", "ANDMask+CORAL"])
def test_compositions_on_a_backbone_take_one_pass(name: str) -> None:
    """Against copies of the network, one an environment; the mask is open, so that rounding cannot switch it."""
    shape = (3, 32, 32)
    build = build_featurizer("test_resnet.r160_in1k", shape, {}, "none")
    composed = ALGORITHMS[name].build(Problem(build, 2, 3, shape, differentiate=Autograd()))
    assert isinstance(composed, Composed)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, *shape, generator=generator), torch.randint(3, (2, 4), generator=generator)
    rows = {row.name: row.default for row in ALGORITHMS[name].hparams if isinstance(row, Hparam)}
    values = {**rows, "tau": 0.0, "rescale": 0, "lr": 1e-2, "weight_decay": 0.0, "dropout": 0.0}
    hparams = {name: torch.tensor(float(value)) for name, value in values.items()}
    arguments = (composed.init(0), make_batch(x, y, random.key_of(0)), hparams, random.key_of(1))
    slow, of_slow = composed.step(*arguments)
    composed.step = None  # type: ignore[method-assign, assignment] # what one pass falls back to
    fast, of_fast = looped_step(composed)(*pytree.tree_map(lambda t: t.unsqueeze(0), arguments))
    assert of_fast["loss"].item() == pytest.approx(of_slow["loss"].item(), rel=1e-5)
    torch.testing.assert_close(fast["adam"].mean[0], slow["adam"].mean, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["ERM", "ANDMask", "SANDMask", "SANDMask-released"])
def test_a_run_does_not_feel_its_neighbours(
    algorithm: str, dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    specs = [
        spec_of(algorithm, (k % 3,), seed=k, trial_seed=k, hparams={"lr": 0.003 * (k + 1), "dropout": 0.1 * k})
        for k in range(4)
    ]
    together = train(Stack(specs, dataset, device))
    for k, spec in enumerate(specs):
        alone = train(Stack([spec], dataset, device))
        torch.testing.assert_close(together["params"][k], alone["params"][0], rtol=1e-8, atol=1e-10)


def test_an_interrupt_while_a_graph_takes_over_a_carry_leaves_a_whole_one(
    dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack([spec_of("ERM")], dataset, device)
    undisturbed, stopped = (
        Program(stack, Carry(stack.init(), {}, torch.full((1,), -1, device=device))) for _ in range(2)
    )
    for each in (undisturbed, stopped):
        each.advance(1)
    undisturbed.advance(1)

    def copy_one(source: Any, target: Any) -> None:
        pytree.tree_leaves(target)[0].copy_(pytree.tree_leaves(source)[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(stopped, "_step", lambda: None)  # what a captured step would be
    monkeypatch.setattr(cuda_graph, "_copy", copy_one)
    with pytest.raises(KeyboardInterrupt):
        stopped.advance(1)
    torch.testing.assert_close(stopped.carry.tree(), undisturbed.carry.tree(), rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["ERM", "SANDMask", "VREx", "Fish"])
def test_steps_in_turns_are_the_same_steps(
    algorithm: str, dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of steps that a turn has, and where evaluations fall; the run with a huge rate diverges.

    With a width of 256, the parameters of the second run are not aligned in memory, by which CPU kernels round.
    """
    hparams = [{"mlp_width": 256, "lr": 1e35 if k == 2 else 0.01} for k in range(3)]
    specs = [spec_of(algorithm, seed=k, steps=12, hparams=hparams[k]) for k in range(3)]
    carries = []
    for seconds in (0.0, 1e6):
        monkeypatch.setattr(cuda_graph, "TURN_SECONDS", seconds)
        stack = Stack(specs, dataset, device)
        monkeypatch.setattr(stack, "_together", 1)
        turns = Program(stack, Carry(stack.init(), {}, torch.full((3,), -1, device=device)), fast=False)
        calls = 0
        while turns.done < 12:
            turns.advance(12 - turns.done)
            calls += 1
        assert calls == (12 if seconds == 0 else 2)  # the first is of one step, which is timed
        carries.append(turns.carry)
    one_by_one, several = (pytree.tree_leaves(carry.tree()) for carry in carries)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(one_by_one, several, strict=True))
    assert (carries[0].diverged_at >= 0).tolist() == [False, False, True]


def test_batches_of_several_steps_are_those_of_the_feed(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    stack = Stack([spec_of(seed=1), spec_of(seed=2, trial_seed=1)], dataset, device)
    fed = list(stack.feed(3))[:4]
    drawn = list(stack.batches(torch.tensor(3), 4))
    for one, other in zip(fed, drawn, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_evaluation_counts_right_answers(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    stack = Stack([spec_of(seed=1), spec_of(seed=2, trial_seed=1, test_envs=(2,))], dataset, device)
    state = pytree.tree_map(lambda t: t.float() if t.is_floating_point() else t, train(stack))
    found = stack.accuracies(state)
    predict = stack.lift(stack.algorithm.predict, (0, 0))
    in_context = stack.evaluator.fractions(stack.evaluator.in_context(predict, state).right)
    for k, spec in enumerate(stack.specs):
        params = stack.algorithm.network.unflatten(state["params"][k])
        for env in range(3):
            for split, accuracies in zip(
                split_environment(dataset, env, spec.trial_seed), (found.inside, found.outside), strict=True
            ):
                predicted = stack.algorithm.network.logits(params, dataset.inputs(split)).argmax(1)
                assert accuracies[k, env] == (predicted == dataset.labels[split]).double().mean().item()
    np.testing.assert_array_equal(found.inside, in_context.inside)
    np.testing.assert_array_equal(found.outside, in_context.outside)


def test_wide_networks_are_evaluated_on_fewer_examples_at_a_time(spec_of: Specs, device: torch.device) -> None:
    """The kernels' addresses within a run have 32 bits."""
    parts = [(torch.zeros(500, 2), torch.zeros(500)) for _ in range(3)]
    many = TensorDataset("DebugVector", ("a", "b", "c"), ("0", "1"), parts)
    wide = Stack([spec_of(hparams={"mlp_width": 2048})], many, device)
    assert max(len(chunk) for part in wide.evaluator._parts for chunk in part.chunks) * 2048 <= CACHED_ACTIVATIONS


def test_half_precision_is_scaled_into_its_range(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    """A run whose risks, and so its gradients, are far below what float16 can hold trains as in float32."""
    curves = []
    for precision in ("fp32", "fp16"):
        specs = [spec_of("ANDMask", precision=precision, steps=60, hparams={"tau": 0.5, "lr": 0.05}) for _ in range(2)]
        stack = Stack(specs, dataset, device)
        state, losses = stack.init(), []
        for batch in stack.feed(0):
            state, metrics = stack.step(state, batch)
            losses.append(metrics["loss"][0].item())
        curves.append(losses)
    assert min(curves[1]) < 1e-5
    single, half = (np.log(np.maximum(curve, 1e-6)) for curve in curves)
    assert np.median(np.abs(half - single)) < 0.5


def test_half_precision_keeps_the_signs_of_well_fitted_environments(device: torch.device) -> None:
    """Whose risk float32 cannot tell from 0, while others still have something to learn. Signs count the same."""
    spirals, entry = load_dataset("Spirals"), DATASETS["Spirals"]
    how = {"steps": 13, "hparams": {"batch_size": 16, "mlp_width": 64, "tau": 0.0}, "space": "paper"}
    single, half = (
        Stack([make_spec(entry, "ANDMask", [0], precision=precision, **how)], spirals, device)  # type: ignore[arg-type]
        for precision in ("fp32", "fp16")
    )
    *earlier, batch = single.feed(0)
    state = single.init()
    for one in earlier:
        state, _ = single.step(state, one)

    def moments(stack: Stack, vectors: Tensor, batch: EnvBatch) -> tuple[TensorMoments, Tensor]:
        assert isinstance(stack.algorithm, MaskedAlgorithm)
        found, risks, _ = moments_of_runs(stack.algorithm, {"params": vectors}, batch, stack.hparams, stack.keys)
        return found, risks

    vectors = state["params"]
    exact, risks = moments(single, vectors.double(), batch._replace(x=batch.x.double()))
    assert risks.min() < 1e-12
    assert risks.max() > 1e-2
    found = [moments(stack, vectors, batch)[0].sign_sum for stack in (single, half)]
    wrong = [(signs - exact.sign_sum).abs().mean() for signs in found]
    assert wrong[1] < 1.2 * wrong[0]


def test_half_precision_is_for_masks_only(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    with pytest.raises(SandmaskError, match="fp16 supports only gradient masks"):
        Stack([spec_of("ERM", precision="fp16")], dataset, device)


def test_half_precision_is_for_losses_of_the_logits(
    dataset: Dataset, spec_of: Specs, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are scaled at the logits: those of a penalty of the features would be wrong by that factor."""

    class Penalized(SANDMaskAlgorithm):
        def risks(self, params: Params, batch: EnvBatch, hparams: Hparams) -> Tensor:
            features = self.features(params, batch, hparams)
            logits = self.network.classify(params, features)
            return environment_risks(logits, batch) + features.square().mean((1, 2))

    entry = replace(ALGORITHMS["SANDMask"], name="Penalized", build=Penalized)
    monkeypatch.setitem(ALGORITHMS._entries, "penalized", entry)
    Stack([spec_of("SANDMask", precision="fp16")], dataset, device)
    Stack([spec_of("Penalized")], dataset, device)
    with pytest.raises(SandmaskError, match="with the cross-entropy of its logits"):
        Stack([spec_of("Penalized", precision="fp16")], dataset, device)


def test_runs_of_different_shapes_do_not_stack(dataset: Dataset, spec_of: Specs, device: torch.device) -> None:
    with pytest.raises(SandmaskError, match="cannot train as one"):
        Stack([spec_of(), spec_of(hparams={"batch_size": 9})], dataset, device)


def test_an_environment_without_examples_to_select_by_is_refused(spec_of: Specs, device: torch.device) -> None:
    entry = DATASETS["DebugVector"]
    sizes = (9, 4, *[9] * (len(entry.environments) - 2))
    parts = [(torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)) for n in sizes]
    small = TensorDataset("DebugVector", entry.environments, ("0", "1"), parts)
    with pytest.raises(SandmaskError, match=f"at least 5 examples.* Found 4 in '{entry.environments[1]}'"):
        Stack([spec_of()], small, device)


def test_runs_with_hyperparameters_of_different_names_do_not_stack(
    dataset: Dataset, spec_of: Specs, device: torch.device
) -> None:
    """The runs' numbers are stacked by the first one's names: one that only another has would be ignored."""
    plain = spec_of("ERM")
    own = replace(plain, hparams={**plain.hparams, "adam_beta1": 0.0})
    with pytest.raises(SandmaskError, match="cannot train as one program"):
        Stack([plain, own], dataset, device)


N_ENVS, WIDTH = 3, 5


class Transposing(Featurizer):
    """Multiplies by `weight.T` instead of calling a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.n_features = WIDTH

    def forward(self, x: Tensor, drop: Any = None) -> Tensor:
        return torch.relu(self.layer(x)) @ self.weight.T


@pytest.mark.parametrize("steps", [stacked_step, looped_step])
@pytest.mark.parametrize("n_runs", [1, 2])
def test_a_transposed_parameter_trains(steps: Any, n_runs: int) -> None:
    differentiate = Functional() if n_runs > 1 else Direct()
    problem = Problem(Transposing, N_ENVS, 2, (4,), dropout=False, differentiate=differentiate)
    algorithm = ALGORITHMS["ANDMask"].build(problem)
    torch.manual_seed(0)
    keys = torch.stack([random.key_of(run) for run in range(n_runs)])
    batches = [make_batch(torch.randn(N_ENVS, 6, 4), torch.randint(0, 2, (N_ENVS, 6)), key) for key in keys]
    hparams = {name: torch.full((n_runs,), value) for name, value in (("lr", 0.1), ("weight_decay", 0.0), ("tau", 0.0))}
    states = [algorithm.init(run) for run in range(n_runs)]
    args = [pytree.tree_map(lambda *leaves: torch.stack(leaves), *each) for each in (states, batches)]
    found, _ = steps(algorithm)(*args, hparams, keys)
    for run in range(n_runs):
        one = pytree.tree_map(lambda t: t[run], (*args, hparams, keys))  # noqa: B023
        expected, _ = algorithm.step(*one)
        torch.testing.assert_close(found["params"][run], expected["params"], rtol=1e-4, atol=1e-5)
