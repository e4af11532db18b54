"""Kernels of K runs at the edges: random shapes, long offsets, and runs beside one that has diverged.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

import importlib
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from sandmask.functional import random
from sandmask.functional.conv import channels_last
from sandmask.functional.dense import Dropout, by_environment, layer_backward
from sandmask.functional.kernels import conv as conv_kernels
from sandmask.functional.kernels import conv_pair, conv_weights, dense, head, moments, norm, norm_relu, products
from sandmask.functional.kernels import random as random_kernels
from sandmask.functional.kernels import split as split_kernels
from sandmask.functional.kernels.tiles import places
from sandmask.masks import gradient_moments
from sandmask.training.precision import set_precision, temporary_precision

shared: Any = importlib.import_module("conv_kernel_checks")
DEVICE, assert_near = shared.DEVICE, shared.assert_near
few = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),  # to shrink a failing shape would take minutes
)
channels = st.sampled_from((16, 32))


@pytest.fixture(autouse=True)
def full_precision() -> None:
    set_precision("fp32")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@triton.jit
def _places_kernel(out, program, reach, size: tl.constexpr):
    found = places(program, size, reach)
    tl.store(out + tl.arange(0, size), found.to(tl.int64))


@pytest.mark.parametrize("reach", [1, 5, 2**31 - 1, 2**31, 2**40])
def test_places_do_not_overflow(reach: int) -> None:
    program = (reach - 1) // 16
    out = torch.empty(16, dtype=torch.int64, device=DEVICE)
    launch: Any = _places_kernel[(1,)]
    launch(out, program, reach, 16)
    wanted = program * 16 + torch.arange(16)
    assert torch.equal(out.cpu()[: min(reach, 15)], wanted[: min(reach, 15)])  # beyond `reach` nothing is read


@few
@given(
    n_runs=st.integers(1, 3),
    n_envs=st.integers(1, 3),
    batch=st.integers(1, 3),
    n_in=st.sampled_from((1, 3, 5, 16, 24)),
    n_out=channels,
    sides=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.sampled_from((1, 2)),
    side=st.sampled_from((1, 3, 5)),
    is_shared=st.booleans(),
)
def test_convolutions_of_any_shape(
    n_runs: int, n_envs: int, batch: int, n_in: int, n_out: int, sides: Any, stride: int, side: int, is_shared: bool
) -> None:
    x = numbers(1 if is_shared else n_runs, n_envs * batch, n_in, *sides).expand(n_runs, -1, -1, -1, -1)
    weight, bias = numbers(n_runs, n_out, n_in, side, side, seed=1), numbers(n_runs, 3 * n_out, seed=2)[:, :n_out]
    own = [tensor.double().requires_grad_() for tensor in (x, weight)]
    pairs = zip(*own, bias.double(), strict=True)
    wanted = torch.stack([F.conv2d(a, b, c, stride, side // 2) for a, b, c in pairs])
    images, taps = channels_last(x), conv_kernels.by_tap(weight)
    found = conv_kernels.convolve(images, taps, bias, stride, relu=False)
    assert_near(found.permute(0, 1, 4, 2, 3), wanted, 1e-5)
    if side == 3:
        both = conv_pair.convolve_sum([(images, taps), (images, -taps)], bias, stride)
        assert_near(both, bias[:, None, None, None].expand_as(both), 1e-5 * (1 + float(wanted.detach().abs().max())))

    along = numbers(*wanted.shape, seed=3)
    of_x, of_weight = torch.autograd.grad((wanted * along).sum(), own)
    grad = channels_last(along)
    found = conv_kernels.input_gradient(grad, taps, stride, x.shape[3:])
    assert_near(found.permute(0, 1, 4, 2, 3), of_x, 1e-5)
    assert_near(conv_weights.weight_gradient(grad, images, weight, stride), of_weight, 1e-5)
    parts = conv_weights.weight_parts(grad, images, n_envs, stride, side)
    targets = torch.empty(3, n_runs, weight[0].numel() + 3, device=DEVICE)
    conv_weights.weight_moments(grad, images, None, n_envs, stride, targets[..., 3:], side)
    for by_env, target in zip(parts.sum(2).double(), targets.unbind(1), strict=True):
        exact = gradient_moments(by_env)
        assert_near(target[1, 3:], exact.mean, 1e-4)
        assert (target[2, 3:] - exact.m2).abs().max() <= 1e-4 * by_env.square().max()


@few
@given(
    n_runs=st.integers(1, 3),
    n_envs=st.integers(1, 3),
    batch=st.integers(1, 2),
    n_channels=channels,
    groups=st.sampled_from((1, 4, 16)),
    sides=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    even=st.booleans(),
)
def test_normalizations_of_any_shape(
    n_runs: int, n_envs: int, batch: int, n_channels: int, groups: int, sides: Any, even: bool
) -> None:
    """With images that are larger than a program's block, and gradients that are the same for all pixels."""
    h = numbers(n_runs, n_envs * batch, *sides, n_channels).relu()  # what `normalize_backward` takes
    gamma, beta = numbers(2, n_runs, 2 * n_channels, seed=1)[..., :n_channels]
    share = torch.rand(n_runs, n_envs, batch, device=DEVICE)
    own = [tensor.double().requires_grad_() for tensor in (h, gamma, beta)]
    normal = torch.stack(
        [
            F.group_norm(one.permute(0, 3, 1, 2), groups, slope, level, norm.EPS).permute(0, 2, 3, 1)
            for one, slope, level in zip(*own, strict=True)
        ]
    )
    y, mean, scale = norm.normalize(h, gamma, beta, groups)
    assert_near(y, normal, 1e-4)
    grad = numbers(*((*h.shape[:2], 1, 1) if even else h.shape[:4]), n_channels, seed=2).expand_as(h)
    found, sums = norm.normalize_backward(grad, h, mean, scale, gamma, groups)
    of_h, *of_rest = torch.autograd.grad((normal * grad).sum(), own, retain_graph=True)
    # Relative to what arrives: the gradient that all pixels share may cancel, and a small variance magnifies rounding.
    tolerance = 1e-5 * float(scale.max() ** 2 * gamma.abs().max() * grad.abs().max())
    assert (found - torch.where(h > 0, of_h, 0.0)).abs().max() <= tolerance
    for one, other in zip(sums.sum(1).unbind(1)[1:], of_rest, strict=True):
        assert (one - other).abs().max() <= 1e-5 * float(scale.max() * grad.abs().sum((1, 2, 3)).max())

    means = (normal.relu().view(n_runs, n_envs, batch, *h.shape[2:]) * share[..., None, None, None]).sum(2)
    assert_near(norm_relu.mean_of_normalized(h, mean, scale, gamma, beta, share, groups), means, 1e-4)
    along = grad[:, :n_envs]
    found, _ = norm_relu.normalize_relu_backward(along, h, mean, scale, gamma, beta, groups, share)
    (of_h,) = torch.autograd.grad((means * along).sum(), own[0])
    assert (found - of_h).abs().max() <= tolerance


@few
@given(
    n_runs=st.integers(1, 3),
    n_envs=st.integers(1, 3),
    batch=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    is_shared=st.booleans(),
)
def test_layers_of_any_shape(n_runs: int, n_envs: int, batch: int, sizes: tuple[int, int], is_shared: bool) -> None:
    (n_out, n_in), n_rows = sizes, n_envs * batch
    x = numbers(1 if is_shared else n_runs, n_rows, n_in).expand(n_runs, -1, -1)
    weight, bias = numbers(n_runs, n_out, n_in, seed=1), numbers(n_runs, n_out, seed=2)
    rate = torch.linspace(0.0, 0.5, n_runs, device=DEVICE)
    keys = random.keys(random.key_of(0).to(DEVICE), n_runs, n_rows)
    before = torch.baddbmm(bias.unsqueeze(1).double(), x.double(), weight.mT.double())
    wanted = Dropout(rate.view(-1, 1, 1), keys)(before, 1).relu()
    if n_in <= dense.NARROW.depth:
        found = dense.narrow_layer(x, weight, bias, keys, rate, 1, n_out + 3)
        assert_near(found, F.pad(wanted, (0, 3)), 1e-5)
    halves, own = split_kernels.split(x), split_kernels.split(weight)
    assert_near(products.layer(halves, own, bias, keys, rate, 1), wanted, 1e-5)

    grad, out = numbers(n_runs, n_rows, n_out, seed=3), wanted.float()
    of_before, of_bias = layer_backward(grad.double(), out.double(), rate.double(), n_envs)
    found, sums = dense.activate_backward(grad, out, rate, batch)
    assert_near(found, of_before, 1e-5)
    assert (sums - of_bias).abs().max() <= 1e-4
    targets = torch.empty(3, n_runs, n_out * n_in, device=DEVICE)
    moments.weight_moments(split_kernels.split(found), halves, None, n_envs, (n_out, n_in), targets)
    by_env = by_environment(of_before, n_envs).mT @ by_environment(x.double(), n_envs)
    assert (targets[1] - by_env.mean(1).flatten(1)).abs().max() <= 1e-5 * (1 + by_env.abs().max())
    logits = head.logits(x.contiguous(), weight, bias)
    assert_near(logits, before, 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from NumPy, in which the interpreter computes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_run_that_diverged_leaves_the_others_as_they_are(value: float) -> None:
    """To the last bit; products of halves are scaled by a run's own largest number."""
    x, weight, bias = numbers(3, 4, 3, 3, 16), numbers(3, 16, 9, 16, seed=1), numbers(3, 16, seed=2)

    def results(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        images, taps, rows = split_kernels.split(x), split_kernels.split(weight), split_kernels.split(x.flatten(2))
        h = conv_kernels.convolve(images, taps, bias, 1)
        y, mean, scale = norm.normalize(h, bias, bias, 4)
        before, sums = norm.normalize_backward(y, h, mean, scale, bias, 4)
        matrix = split_kernels.split(weight.flatten(2))
        folded = torch.empty(3, len(x), 16 * 144, device=DEVICE)
        conv_weights.weight_moments(split_kernels.split(before), images, None, 2, 1, folded)
        units = products.layer(rows, matrix, bias)
        halves, parts = dense.activate_backward_halves(units, units, None, 2)
        return [h, y, before, sums, *folded, units, *halves, parts, products.weight_gradient(halves, rows)]

    with temporary_precision("fp32x3"):
        wanted = results(x[1:], weight[1:], bias[1:])
        x[0, 1, 1, 1, 3] = value
        found = results(x, weight, bias)
    for one, other in zip(found, wanted, strict=True):
        own = one[1:] if len(one) == 3 else one
        assert torch.equal(own, other)


@few
@given(
    shape=st.lists(st.integers(1, 40), max_size=3),
    number=st.one_of(st.integers(-3, 3), st.integers(-(2**62), 2**62)),
)
def test_keys_by_any_number(shape: list[int], number: int) -> None:
    keys = random.keys(random.key_of(1), *shape).to(DEVICE)
    wanted = random.fold(keys.cpu(), number)
    assert torch.equal(random_kernels.fold(keys, number).cpu(), wanted)
    assert torch.equal(random_kernels.fold(keys, torch.tensor(number, device=DEVICE)).cpu(), wanted)
