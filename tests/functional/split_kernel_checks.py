"""Products of halves against float64, and against plain float32.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask.functional import dense, head, random, scaling
from sandmask.functional.dense import Dropout
from sandmask.functional.flat import Slot
from sandmask.functional.kernels import dense as dense_kernels
from sandmask.functional.kernels import head as head_kernels
from sandmask.functional.kernels import moments, products
from sandmask.functional.kernels import scaling as scale_kernels
from sandmask.functional.kernels.dense import narrow_layer
from sandmask.functional.kernels.split import split
from sandmask.functional.split import joined, largest_of, plain_split
from sandmask.functional.tape import MomentTape, layers, moment_tape
from sandmask.masks import gradient_moments
from sandmask.training.precision import temporary_precision

shared = importlib.import_module("conv_kernel_checks")
DEVICE = shared.DEVICE
K, E, B, IN, OUT = 2, 3, 20, 48, 80
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: NaN times a scale


def normal(*shape: int, sizes: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Numbers of two runs, each of its own size."""
    numbers = torch.randn(K, *shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (numbers * torch.tensor(sizes).view(-1, *[1] * len(shape))).to(DEVICE)


def assert_as_exact(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The error of every run is at most twice that of float32."""
    errors, plains = ((one.double() - exact).flatten(1).norm(dim=1) for one in (found, plain))
    assert (errors <= 2 * plains).all(), (errors / plains).tolist()


def test_halves_are_those_of_the_plain_twin_and_keep_22_bits() -> None:
    x = normal(7, 33, sizes=(1e-30, 1e30))
    x[0, 0] = 0.0
    halves, plain = split(x), plain_split(x)
    assert torch.equal(halves.values, plain.values)
    assert torch.equal(halves.largest, plain.largest)
    clear = x.abs() > x.abs().amax((1, 2), keepdim=True) * 2.0**-17
    assert ((joined(halves) - x).abs()[clear] <= 2.0**-22 * x.abs()[clear].double()).all()
    assert (joined(split(torch.zeros(2, 5, device=DEVICE))) == 0).all()


def test_halves_with_zeros_added_and_of_what_the_runs_share() -> None:
    x = normal(5, 18)
    wide = torch.nn.functional.pad(x, (0, 14, 0, 3))
    assert torch.equal(split(x, 8, 32).values, split(wide).values)
    halves = split(x[:1].expand_as(x))
    assert halves.values.stride(0) == 0
    assert torch.equal(halves.values[1], split(x).values[0])


def test_a_run_with_nan_or_inf_stays_so_and_leaves_others_alone() -> None:
    for bad in (torch.nan, torch.inf):
        x, weight, bias = normal(20, 32), normal(32, 32), normal(32)
        x[0, 3, 5] = bad
        y = products.layer(split(x), split(weight), bias)
        assert not y[0, 3].isfinite().all()
        assert y[1].isfinite().all()


def test_products_are_as_exact_as_in_float32() -> None:
    """Also of gradients too small, and of activations too large, for float16."""
    x, weight, bias = normal(E * B, IN, sizes=(1.0, 1e7)), normal(OUT, IN, sizes=(1.0, 1e-3)), normal(OUT)
    grad = normal(E * B, OUT, sizes=(1e-12, 1e-20))
    exact_x, exact_weight, exact_grad = x.double(), weight.double(), grad.double()
    halves, of_weight, of_grad = split(x), split(weight), split(grad)
    plain, exact = (
        torch.baddbmm(bias.unsqueeze(1), x, weight.mT),
        exact_x @ exact_weight.mT + bias.double().unsqueeze(1),
    )
    assert_as_exact(products.layer(halves, of_weight, bias, relu=False), plain, exact)
    assert_as_exact(products.layer(halves, of_weight, bias), plain.relu(), exact.relu())
    assert_as_exact(products.input_gradient(of_grad, of_weight), grad @ weight, exact_grad @ exact_weight)
    assert_as_exact(products.weight_gradient(of_grad, halves), grad.mT @ x, exact_grad.mT @ exact_x)


@pytest.mark.parametrize("halves", [False, True], ids=["numbers", "halves"])
@pytest.mark.parametrize(("n_envs", "n_in"), [(1, IN), (3, IN), (3, 5)])
def test_moments_of_products(n_envs: int, n_in: int, halves: bool) -> None:
    x, grad = normal(E * B, n_in), normal(E * B, OUT, sizes=(1e-9, 1.0))
    roots = torch.exp2(2.0 * torch.randint(-4, 1, (K, E * B), device=DEVICE))
    targets = torch.empty(3, K, OUT * n_in, device=DEVICE)
    left, right = (split(grad), split(x)) if halves else (grad, x)
    moments.weight_moments(left, right, None, n_envs, (OUT, n_in), targets, roots)

    def wanted(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        sides = grad.to(dtype), x.to(dtype) * roots.unsqueeze(-1).to(dtype)
        of_grad, of_x = (dense.by_environment(side, n_envs) for side in sides)
        found = gradient_moments((of_grad.mT @ of_x).flatten(2).transpose(0, 1))
        return found.sign_sum, found.mean, found.m2

    exact, plain = wanted(torch.float64), wanted(torch.float32)
    assert (targets[0] == exact[0]).double().mean() > 0.999
    assert_as_exact(targets[1], plain[1], exact[1])
    if n_envs > 1:
        assert_as_exact(targets[2], plain[2], exact[2])


@pytest.mark.parametrize("sizes", [(1e36, 1e-36), (1e-36, 1e36)])
def test_products_of_large_numbers_with_small_ones(sizes: tuple[float, float]) -> None:
    x, weight = normal(E * B, IN, sizes=sizes), normal(OUT, IN, sizes=(sizes[1], sizes[0]))
    found = products.layer(split(x), split(weight), torch.zeros(K, OUT, device=DEVICE), relu=False)
    assert_as_exact(found, x @ weight.mT, x.double() @ weight.double().mT)


def test_a_layer_drops_what_the_plain_layer_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = normal(40, 33), normal(35, 33), normal(35)
    keys = random.keys(torch.stack([random.key_of(k) for k in range(K)]), 40).to(DEVICE)
    rate = torch.tensor([0.0, 0.5], device=DEVICE)
    wanted = torch.stack(
        [dense.plain_dense(x[k], weight[k], bias[k], Dropout(rate[k], keys[k]), site=2) for k in range(K)]
    )
    monkeypatch.setattr(dense, "has_kernels", lambda _: True)
    with temporary_precision("fp32x3"):
        found = vmap(lambda x, w, b, key, rate: dense.dense(x, w, b, Dropout(rate, key), 2))(
            x, weight, bias, keys, rate
        )
    torch.testing.assert_close(found[..., :35], wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., :35] == 0, wanted == 0)


def test_a_product_remembers_its_largest_magnitudes_until_it_is_changed() -> None:
    x, weight, bias = normal(E * B, IN), normal(OUT, IN, sizes=(1.0, 1e3)), normal(OUT)
    y = products.layer(split(x), split(weight), bias)
    g = products.input_gradient(split(y), split(weight))
    with temporary_precision("fp32x3"):
        of_x, _ = head_kernels.gradients(normal(E * B, 2), y, normal(2, OUT), B)
    for found in (y, g, of_x):
        assert torch.equal(largest_of(found), found.abs().amax((1, 2)))
        found.mul_(2.0)
        assert torch.equal(largest_of(found), found.abs().amax((1, 2)))


@pytest.mark.parametrize("n_in", [32, 18], ids=["halves", "a narrow layer in float32"])
def test_the_next_layer_need_not_look_for_the_largest_magnitudes(monkeypatch: pytest.MonkeyPatch, n_in: int) -> None:
    """Neither forwards nor backwards: only for the inputs, the weights and the gradient of the result."""
    x = normal(E * B, n_in)
    params = [normal(48, n_in), normal(48), normal(32, 48), normal(32)]
    looked_at, norm = [], torch.linalg.vector_norm

    def watched(x: Tensor, order: float, dim: int) -> Tensor:
        looked_at.append(tuple(x.shape))
        found: Tensor = norm(x, order, dim=dim)
        return found

    def network(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return dense.dense(dense.dense(x, w, b), v, c)

    monkeypatch.setattr(dense, "has_kernels", lambda _: True)
    monkeypatch.setattr(torch.linalg, "vector_norm", watched)
    leaves = [param.requires_grad_() for param in params]
    with temporary_precision("fp32x3"):
        found = torch.autograd.grad(vmap(network)(x, *leaves).square().sum(), leaves)
    first = [(K, E * B * 32), (K, 48 * 32)] if n_in == 32 else []
    assert looked_at == [*first, (K, 32 * 48), (K, E * B * 32)]
    w, b, v, c = exact = [param.detach().double().requires_grad_() for param in params]
    hidden = torch.baddbmm(b.unsqueeze(1), x.double(), w.mT).relu()
    y = torch.baddbmm(c.unsqueeze(1), hidden, v.mT).relu()
    for mine, other in zip(found, torch.autograd.grad(y.square().sum(), exact), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rate", [None, (0.0, 0.5)], ids=["", "dropout"])
def test_a_layer_with_few_inputs(rate: tuple[float, ...] | None) -> None:
    """Of inputs that the runs share, and of weights inside a longer vector, whose sums are those of float32."""
    n_rows, n_in, n_out = 70, 18, 35
    flat, x = normal(1000), normal(n_rows, n_in)[:1].expand(K, -1, -1)
    weight, bias = flat[:, 7 : 7 + n_out * n_in].view(K, n_out, n_in), flat[:, 800 : 800 + n_out]
    keys = random.keys(torch.stack([random.key_of(k) for k in range(K)]), n_rows).to(DEVICE)
    drops = [None if rate is None else Dropout(torch.tensor(rate[k], device=DEVICE), keys[k]) for k in range(K)]
    plain, exact = (
        torch.stack([dense.plain_dense(x[k].to(t), weight[k].to(t), bias[k].to(t), drops[k], site=1) for k in range(K)])
        for t in (torch.float32, torch.float64)
    )
    rates = None if rate is None else torch.tensor(rate, device=DEVICE)
    with temporary_precision("fp32x3"):
        found = narrow_layer(x, weight, bias, keys, rates, 1, 48)
    assert_as_exact(found[..., :n_out], plain, exact)
    assert found[..., n_out:].abs().sum() == 0
    assert torch.equal(largest_of(found), found.amax((1, 2)))
    weight[1, 3, 0] = torch.nan
    assert narrow_layer(x, weight, bias, None, None, 1, 48).isnan().sum() == n_rows


@pytest.mark.parametrize("n_in", [48, 18])
def test_layers_with_more_rows_than_tiles_in_a_grid(monkeypatch: pytest.MonkeyPatch, n_in: int) -> None:
    """They are computed by torch's products."""
    assert min(dense_kernels.NARROW.rows, products.FORWARD.rows, products.BACKWARD.rows) * 65_535 >= dense.MOST_ROWS
    x, weight, bias = normal(40, n_in), normal(35, n_in), normal(35)
    monkeypatch.setattr(dense, "has_kernels", lambda _: True)
    with temporary_precision("fp32x3"):
        wanted = vmap(dense.dense)(x, weight, bias)
        monkeypatch.setattr(dense, "MOST_ROWS", 39)
        monkeypatch.setattr(dense_kernels, "narrow_layer", None)
        monkeypatch.setattr(products, "layer", None)
        found = vmap(dense.dense)(x, weight, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("least", [None, scaling.LEAST])
@pytest.mark.parametrize("n_classes", [2, 7])
def test_scaling_by_kernel_and_by_torch(n_classes: int, least: int | None) -> None:
    """To the bit, also where all gradients of an environment are 0. Infinity and NaN stay visible."""
    batch = 70
    grad = normal(E * batch, n_classes) * torch.exp2(torch.randint(-110, 30, (K, E * batch, 1), device=DEVICE))
    grad[0, :batch] = 0.0
    how = (E, scaling.TARGET, scaling.LIMITS, least)
    for one, other in zip(scale_kernels.scale(grad, *how), scaling.plain_scale(grad, E, least), strict=True):
        assert one is other if one is None or other is None else torch.equal(one, other)
    grad[1, 3, 0], grad[1, 2 * batch, 1] = torch.inf, torch.nan
    scaled, _, roots = scale_kernels.scale(grad, *how)
    assert scaled[1, 3, 0].isinf()
    assert scaled[1, 2 * batch, 1].isnan()
    assert roots is None or (roots.min() == 2.0**scaling.LEAST and roots.max() == 1.0)


@pytest.mark.parametrize(
    "tiny", [(slice(1, 2), slice(None)), (slice(None), slice(0, None, 2))], ids=["env", "examples"]
)
def test_tiny_gradients_keep_their_signs(tiny: tuple[slice, slice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an environment, or of half of the examples, are 1e-18 of the others, beyond the range of halves.

    Some inputs belong to the tiny ones alone: they decide about the signs of the gradients of these inputs' weights.
    """
    x, params = normal(E * B, 32), [normal(48, 32), normal(48), normal(40, 48), normal(40), normal(2, 40), normal(2)]
    slots = [Slot(name, tensor.shape[1:], tensor[0].numel()) for name, tensor in zip("wbvcha", params, strict=True)]
    sizes = torch.ones(E, B, dtype=torch.float64, device=DEVICE)
    sizes[tiny] = 1e-18
    x[:, sizes.flatten() == 1, :16] = 0.0

    def losses(x: Tensor, *own: Tensor, tape: MomentTape | None) -> Tensor:
        w, b, v, c, h, a = own
        with nullcontext() if tape is None else tape.watch(dict(zip("wbvcha", own, strict=True))):
            logits = head.head(dense.dense(dense.dense(x, w, b), v, c), h, a)
        return (logits.view(E, B, 2).double().square().sum(2) * sizes).mean(1)

    for module in (dense, head, layers, moment_tape, scaling):
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
    found = {}
    for scales in (False, True):
        tape = MomentTape(slots, K, E, torch.empty(0, device=DEVICE), scales=scales)
        leaves = [param.clone().requires_grad_() for param in params]
        with temporary_precision("fp32x3"):
            tape.run(vmap(partial(losses, tape=tape))(x, *leaves).sum(), leaves)
        found[scales] = tape.moments()
    monkeypatch.undo()
    exact = [param.double().requires_grad_() for param in params]
    by_env = [
        torch.cat([g.flatten(1) for g in torch.autograd.grad(value, exact, retain_graph=True)], 1)
        for value in vmap(partial(losses, tape=None))(x.double(), *exact).sum(0)
    ]
    wanted = gradient_moments(torch.stack(by_env))
    assert (found[True].sign_sum == wanted.sign_sum).double().mean() > 0.99
    assert (found[False].sign_sum == wanted.sign_sum).double().mean() < 0.9
    assert_as_exact(found[True].mean, found[False].mean, wanted.mean)
