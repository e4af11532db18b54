"""Blocks of K runs by kernels, against plain operations one run after the other.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask._physical import reachable
from sandmask.algorithms import Algorithm, State
from sandmask.datasets import DATASETS, Dataset, TensorDataset
from sandmask.functional import conv
from sandmask.functional.conv import conv_block, plain_conv_block
from sandmask.functional.flat import Slot
from sandmask.functional.tape import MomentTape, layers, moment_tape
from sandmask.masks import TensorMoments, gradient_moments
from sandmask.networks import MNISTConvNet, small
from sandmask.records import RunSpec
from sandmask.training import Stack, make_spec, stack, stack_step
from sandmask.training.precision import Precision, set_precision, temporary_precision

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
K = 2
NAMES = ("weight", "bias", "gamma", "beta")


@dataclass(frozen=True)
class Case:
    """A block, and the images it is given."""

    n_samples: int
    n_in: int
    n_out: int
    height: int
    width: int
    stride: int
    groups: int
    dtype: torch.dtype = torch.float32

    def tensors(self, seed: int = 0) -> list[Tensor]:
        """x and the parameters, of K runs."""
        generator = torch.Generator().manual_seed(seed)
        sides = (self.n_in, self.height, self.width)
        fan_in = (9 * self.n_in) ** -0.5
        shapes = [(self.n_samples, *sides), (self.n_out, self.n_in, 3, 3), (self.n_out,), (self.n_out,), (self.n_out,)]
        made = [torch.randn(K, *shape, generator=generator) for shape in shapes]
        made[1] *= fan_in
        return [tensor.to(DEVICE, self.dtype).requires_grad_() for tensor in made]

    def apply(self, block: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return block(*tensors, stride=self.stride, groups=self.groups)


CASES = [
    Case(3, 2, 16, 8, 8, 1, 8),
    Case(3, 1, 32, 7, 5, 2, 4),
    Case(1, 16, 16, 4, 6, 1, 16),
    Case(5, 48, 32, 5, 4, 2, 8),
    Case(2, 8, 32, 9, 3, 1, 1),
    Case(2, 32, 16, 1, 1, 2, 2),
]
HALVES = [Case(3, 2, 32, 8, 8, 1, 8, torch.bfloat16), Case(3, 32, 32, 7, 8, 2, 8, torch.bfloat16)]


@pytest.fixture(autouse=True)
def kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conv, small):  # in full precision, too, although there they are slow
        monkeypatch.setattr(module, "kernels_suit", lambda: True)
    set_precision("fp32")
    for module in (conv, layers, moment_tape, stack) if INTERPRETED else ():
        monkeypatch.setattr(module, "has_kernels", lambda tensor: tensor.dtype != torch.float64 and reachable())


def mend_interpreter() -> None:
    """What Triton's interpreter lacks: loops up to an argument, with NumPy 2.4; products of bfloat16; speed."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)  # Triton 3.3 has no scope
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.get_int1_ty = lambda _: tl.int1  # Triton 3.3
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    # Patch the language once, not for every call of a function. Do not look for overflows: nothing uses what is found.
    patch_language = cache(interpreter._patch_lang)
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None, scope=patch_language(fn))
    builder.options = replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    mend_interpreter()


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """To within a share of the largest number."""
    assert found.shape == wanted.shape
    away = (found.double() - wanted.double()).abs().max()
    assert away <= tolerance * wanted.double().abs().max(), f"{away} of {wanted.abs().max()}"


def exactly(case: Case, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """The block's results run by run in float64, their gradients along some direction, and that direction."""
    own = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y = torch.stack([case.apply(plain_conv_block, *(tensor[k] for tensor in own)) for k in range(K)])
    along = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return y, list(torch.autograd.grad((y * along).sum(), own)), along


@pytest.mark.parametrize("case", CASES + HALVES)
def test_a_block_of_k_runs_and_its_gradients(case: Case) -> None:
    tensors = case.tensors()
    wanted, gradients, along = exactly(case, tensors)
    y = vmap(lambda *own: case.apply(conv_block, *own))(*tensors)
    assert y.dtype == case.dtype
    assert_near(y, wanted, 1e-5 if case.dtype == torch.float32 else 2e-2)
    # Half precision rounds results to zero that are not: then the ReLU's derivative is another one.
    tolerance = 2e-5 if case.dtype == torch.float32 else 6e-2
    for found, gradient in zip(torch.autograd.grad((y * along).sum(), tensors), gradients, strict=True):
        assert_near(found, gradient, tolerance)


def test_results_are_the_same_each_time_and_whoever_is_beside() -> None:
    case = CASES[2]
    tensors = case.tensors()

    def results(*own: Tensor) -> list[Tensor]:
        y = vmap(lambda *one: case.apply(conv_block, *one))(*own)
        return [y, *torch.autograd.grad(y.square().sum(), own)]

    together, again, alone = results(*tensors), results(*tensors), results(*(tensor[1:] for tensor in tensors))
    for one, other, own in zip(together, again, alone, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[1:], own)


def test_a_block_outside_of_vmap_and_with_a_shared_input() -> None:
    case = CASES[0]
    x, *params = (tensor.detach() for tensor in case.tensors())
    wanted = torch.stack([case.apply(plain_conv_block, x[0], *(param[k] for param in params)) for k in range(K)])
    alone = case.apply(conv_block, x[0], *(param[0] for param in params))
    assert_near(alone, wanted[0], 1e-5)
    shared = vmap(lambda x, *own: case.apply(conv_block, x, *own), in_dims=(None, 0, 0, 0, 0))(x[0], *params)
    assert_near(shared, wanted, 1e-5)
    assert shared.permute(0, 1, 3, 4, 2).is_contiguous(), "the next block would have to reorder it"
    assert conv.channels_last(x[:1].expand_as(x)).untyped_storage().nbytes() == x[0].nbytes


def test_what_is_no_number_stays_visible() -> None:
    case = CASES[0]
    tensors = [tensor.detach() for tensor in case.tensors()]
    tensors[0][0, 1, 0, 3, 3] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    y = vmap(lambda *own: case.apply(conv_block, *own))(*leaves)
    assert y[0, 1].isnan().all()
    assert not y[0, 0].isnan().any()
    assert not y[1].isnan().any()
    for gradient in torch.autograd.grad(y.square().sum(), leaves):
        assert gradient[0].isnan().any()
        assert not gradient[1].isnan().any()


def test_shapes_that_no_kernel_is_for_are_computed_by_plain_operations() -> None:
    case = Case(2, 3, 24, 4, 4, 1, 8)
    x, *params = (tensor[0] for tensor in case.tensors())
    assert torch.equal(case.apply(conv_block, x, *params), case.apply(plain_conv_block, x, *params))


def moments_of_plain_blocks(case: Case, tensors: list[Tensor], n_envs: int) -> list[TensorMoments]:
    """For every run, moments of the environments' gradients of the flat parameters, each by itself, in float64."""
    moments = []
    for k in range(K):
        gradients = []
        for x in tensors[0][k].detach().double().chunk(n_envs):
            own = [tensor[k].detach().double().requires_grad_() for tensor in tensors[1:]]
            y = case.apply(plain_conv_block, x, *own).mean((2, 3))
            pieces = torch.autograd.grad(y.square().mean(), own)
            gradients.append(torch.cat([piece.flatten() for piece in pieces]))
        moments.append(gradient_moments(torch.stack(gradients)))
    return moments


@pytest.mark.parametrize(
    ("case", "n_envs", "scaled"),
    [
        (Case(6, 2, 16, 5, 6, 1, 8), 2, True),
        (Case(6, 16, 16, 5, 6, 2, 8), 1, True),
        (Case(6, 32, 32, 6, 5, 2, 8), 2, False),
        (Case(6, 32, 32, 4, 3, 1, 8), 2, True),
        (Case(6, 16, 16, 3, 3, 1, 4), 3, True),
        (Case(6, 24, 16, 3, 3, 2, 4), 3, False),
        (Case(4, 16, 32, 6, 6, 2, 8, torch.bfloat16), 2, False),
    ],
)
def test_moments_of_k_runs_against_gradients_one_by_one(case: Case, n_envs: int, scaled: bool) -> None:
    tensors = case.tensors()
    shapes = {name: tensor.shape[1:] for name, tensor in zip(NAMES, tensors[1:], strict=True)}
    slots = [Slot(name, shape, shape.numel()) for name, shape in (*shapes.items(), ("unused", torch.Size((3,))))]
    tape = MomentTape(slots, K, n_envs, torch.empty(0, device=DEVICE))

    def losses(x: Tensor, *own: Tensor) -> Tensor:
        with tape.watch(dict(zip(NAMES, own, strict=True))):
            y = case.apply(conv_block, x, *own)
        return y.mean((2, 3)).double().view(n_envs, -1).square().mean(1)

    scale = torch.ones(K, n_envs, device=DEVICE)
    if scaled:
        scale = 2.0 ** torch.arange(K * n_envs, device=DEVICE).view(K, n_envs)
        tape.unscale = 1.0 / scale
    values = vmap(losses)(*tensors)
    arrived = torch.autograd.grad(values, tensors, scale.to(values.dtype), allow_unused=True)
    assert arrived[0] is not None
    assert all(gradient is None for gradient in arrived[1:])
    found = tape.moments()
    tolerance = 1e-4 if case.dtype == torch.float32 else 8e-2  # small groups have small deviations to divide by
    for k, wanted in enumerate(moments_of_plain_blocks(case, tensors, n_envs)):
        n = len(wanted.mean)
        assert_near(found.mean[k, :n], wanted.mean, tolerance)
        if n_envs > 1:
            assert_near(found.m2[k, :n], wanted.m2, 10 * tolerance)
        else:
            assert found.m2[k].abs().max() == 0
        clear = wanted.mean.abs() > tolerance * wanted.mean.abs().max() * n_envs
        alike = (found.sign_sum[k, :n] == wanted.sign_sum) | ~clear
        assert alike.double().mean() > (0.999 if case.dtype == torch.float32 else 0.9)
        assert found.mean[k, n:].abs().max() == 0


@pytest.mark.parametrize("n_envs", [2, 3])
def test_the_dispersion_of_gradients_one_rounding_apart_is_no_negative_zero(n_envs: int) -> None:
    """The released SAND-mask divides by it: -0 in place of 0 would make a weight -inf."""
    from sandmask.functional.kernels import conv_weights

    case = Case(1, 32, 32, 4, 4, 1, 8)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(K, 1, 4, 4, 32, generator=generator).to(DEVICE)
    grad = torch.randn(K, 1, 4, 4, 32, generator=generator).to(DEVICE)
    apart = torch.tensor([1.0, 1.0 - 2.0**-24, 1.0])[:n_envs].to(DEVICE)
    targets = torch.empty(3, K, case.n_out * case.n_in * 9, device=DEVICE)
    repeated = [tensor.repeat(1, n_envs, 1, 1, 1) for tensor in (grad, images)]
    conv_weights.weight_moments(repeated[0], repeated[1], apart.repeat(K, 1), n_envs, case.stride, targets)
    assert targets[1].abs().min() > 0
    assert not torch.signbit(targets[2]).any()


def small_images() -> Dataset:
    """Three environments of a few images, 2 x 4 x 4."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5) % 4
    parts = [(torch.randn(5, 2, 4, 4, generator=generator) + labels.view(-1, 1, 1, 1), labels) for _ in range(3)]
    return TensorDataset("Debug28", ("a", "b", "c"), ("0", "1", "2", "3"), parts)


def specs_of(algorithm: str) -> list[RunSpec]:
    own = {"tau": 0.3} if algorithm == "SANDMask" else {}
    return [
        make_spec(DATASETS["Debug28"], algorithm, [k], seed=k, steps=1, hparams={"batch_size": 3, "lr": 1e-3, **own})
        for k in range(K)
    ]


def one_step(runs: Stack) -> tuple[State, Tensor, Tensor]:
    """The state after it, its losses, and right answers."""
    state, metrics = runs.step(runs.init(), next(runs.feed(0)))
    return state, metrics["loss"].cpu(), runs.tally(state).right.cpu()


def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs time in the interpreter is the number of programs, not their size."""
    from sandmask.functional.kernels import conv as conv_kernels
    from sandmask.functional.kernels import conv_pair, conv_weights
    from sandmask.functional.kernels.tiles import SPLIT, Tiles

    large = dict.fromkeys((4, SPLIT), Tiles(128, 128, 128, 4, 1))
    for module in (conv_kernels, conv_pair, conv_weights):
        for table in (name for name in ("TILES", "THIN_TILES") if hasattr(module, name)):
            monkeypatch.setattr(module, table, large)
    monkeypatch.setattr(conv_weights, "PROGRAMS", 1)


# Fish takes the kernels of ERM, through `vmap` as the tests of blocks do, and twice the time of ERM.
@pytest.mark.parametrize(
    ("algorithm", "precision"),
    [("ERM", "fp32"), ("SANDMask", "fp32"), ("SANDMask", "fp32x3"), ("IGA", "fp32")]
    + ([] if INTERPRETED else [("Fish", "fp32")]),
)
def test_stacked_runs_of_a_network_equal_runs_alone(
    algorithm: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:
        large_tiles(monkeypatch)
    with temporary_precision(precision):
        monkeypatch.setattr(stack_step, "has_kernels", lambda _: True)
        together = Stack(specs_of(algorithm), small_images(), DEVICE)
        assert together.stacks
        if algorithm != "Fish":
            monkeypatch.setattr(together.algorithm, "step", None)  # the step of one run, which is the fallback
        state, losses, counts = one_step(together)
    for module in (conv, layers, moment_tape, stack, stack_step):
        monkeypatch.setattr(module, "has_kernels", lambda _: False)
    for k, spec in enumerate(specs_of(algorithm)):
        alone = Stack([spec], small_images(), torch.device("cpu"))
        assert not alone.stacks
        own_state, own_losses, own_counts = one_step(alone)
        # After one step Adam's running mean is a tenth of the gradient.
        found, wanted = state["adam"].mean[k].cpu(), own_state["adam"].mean[0]
        alike = (found - wanted).abs() <= 1e-3 * wanted.abs() + 1e-5 * wanted.abs().max()
        assert alike.double().mean() > 0.999
        torch.testing.assert_close(losses[k], own_losses[0], rtol=1e-5, atol=1e-5)
        assert (counts[k] - own_counts[0]).abs().sum() <= 1  # of 15: a tie may fall to either side
    assert wanted.abs().max() > 0


def test_steps_that_compute_what_has_no_kernels_are_looped(monkeypatch: pytest.MonkeyPatch) -> None:
    for algorithm in ("ERM", "ANDMask", "Fish", "IGA", "ARM"):
        assert Stack(specs_of(algorithm), small_images(), DEVICE).stacks
    monkeypatch.setattr(Algorithm, "stacks_by_kernels", False)
    assert not Stack(specs_of("ARM"), small_images(), DEVICE).stacks


def test_the_network_is_its_modules_in_a_row() -> None:
    network = MNISTConvNet(2).to(DEVICE)
    x = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.testing.assert_close(network(x), network.blocks(x).mean((2, 3)), rtol=1e-4, atol=1e-4)
