"""Products of halves against float64, and against plain float32.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import importlib

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask.functional import dense, random
from sandmask.functional.dense import Dropout
from sandmask.functional.kernels import moments, products
from sandmask.functional.kernels.split import split
from sandmask.functional.split import joined, plain_split
from sandmask.masks import gradient_moments
from sandmask.training.precision import temporary_precision

shared = importlib.import_module("conv_kernel_checks")
DEVICE = shared.DEVICE
K, E, B, IN, OUT = 2, 3, 20, 48, 80
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: NaN times a scale


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if shared.INTERPRETED:
        shared.mend_interpreter(monkeypatch)


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


@pytest.mark.parametrize("n_envs", [1, 3])
def test_moments_of_products(n_envs: int) -> None:
    x, grad = normal(E * B, IN), normal(E * B, OUT, sizes=(1e-9, 1.0))
    targets = torch.empty(3, K, OUT * IN, device=DEVICE)
    moments.weight_moments(split(grad), split(x), None, n_envs, (OUT, IN), targets)

    def wanted(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        left, right = (dense.by_environment(side.to(dtype), n_envs) for side in (grad, x))
        found = gradient_moments((left.mT @ right).flatten(2).transpose(0, 1))
        return found.sign_sum, found.mean, found.m2

    exact, plain = wanted(torch.float64), wanted(torch.float32)
    assert (targets[0] == exact[0]).double().mean() > 0.999
    assert_as_exact(targets[1], plain[1], exact[1])
    if n_envs > 1:
        assert_as_exact(targets[2], plain[2], exact[2])


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
