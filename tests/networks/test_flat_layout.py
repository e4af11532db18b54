"""Flat modules: the order of the vector, memory format and precision, against the module itself."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from sandmask.functional.flat import FlatModule


class Small(nn.Module):
    """Convolutions (one of them depthwise), batch-norm with statistics, and a constant parameter."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, (3, 2), groups=6, bias=False)
        self.last = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.register_buffer("offset", torch.tensor([0.3]), persistent=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            self.norm.running_mean = torch.randn(6, generator=generator)
            self.norm.running_var = torch.rand(6, generator=generator) + 0.5
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(torch.relu(self.norm(self.first(x)))).mean((2, 3))
        return self.last(x) * self.scale + self.offset  # type: ignore[no-any-return]


def channels_last() -> Small:
    return Small(torch.channels_last)


def inputs(n: int = 5) -> Tensor:
    return torch.randn(n, 3, 9, 8, generator=torch.Generator().manual_seed(1))


def seeded(build: Callable[[], Small]) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build()


@pytest.mark.parametrize("build", [Small, channels_last])
def test_it_computes_what_the_module_computes(build: Callable[[], Small]) -> None:
    flat, module = FlatModule(build), seeded(build)
    vector = flat.init(7)
    tolerance = 0.0 if build is Small else 1e-6  # another memory format may take other kernels
    out, expected = flat(flat.unflatten(vector), inputs()), module(inputs())
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("build", [Small, channels_last])
def test_named_and_flatten_are_inverse(build: Callable[[], Small]) -> None:
    flat = FlatModule(build)
    named = {name: p.detach() for name, p in seeded(build).named_parameters() if p.requires_grad}
    vector = flat.flatten(named)
    assert vector.shape == (flat.numel,) == (sum(p.numel() for p in named.values()),)
    back = flat.named(vector)
    assert set(back) == set(named)
    for name, value in named.items():
        torch.testing.assert_close(back[name], value, rtol=0, atol=0)
    assert torch.equal(flat.init(7), vector)


def test_parameters_are_views_in_the_format_asked_for() -> None:
    flat = FlatModule(channels_last)
    vector = flat.init(0)
    params = flat.unflatten(vector)
    assert params["first.weight"].is_contiguous(memory_format=torch.channels_last)
    assert not params["first.weight"].is_contiguous()
    assert all(p.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr() for p in params.values())
    assert FlatModule(Small).unflatten(vector)["first.weight"].is_contiguous()


def test_both_formats_train_alike() -> None:
    results = []
    for build in (Small, channels_last):
        flat = FlatModule(build)
        leaf = flat.init(7).requires_grad_()
        (gradient,) = torch.autograd.grad(flat(flat.unflatten(leaf), inputs()).square().sum(), leaf)
        results.append(flat.named(gradient))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-5)


def test_constants_are_not_in_the_vector() -> None:
    flat = FlatModule(Small)
    names = {slot.name for slot in flat.slots}
    assert not names & {"scale", "offset", "norm.running_mean"}
    assert {"scale", "offset", "norm.running_mean"} <= set(flat.constants)
    assert [slot.name for slot in flat.slots][-2:] == ["norm.weight", "norm.bias"]


@pytest.mark.parametrize("build", [Small, channels_last])
def test_bfloat16_casts_all_but_batch_norm(build: Callable[[], Small]) -> None:
    flat, module = FlatModule(build, torch.bfloat16), seeded(build)
    leaf = flat.init(7).requires_grad_()
    params = flat.unflatten(leaf)
    exact = {name for name, p in params.items() if p.dtype == torch.float32}
    assert exact == {"norm.weight", "norm.bias"}
    assert flat.constants["norm.running_var"].dtype == torch.float32
    assert flat.constants["offset"].dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in flat.named(leaf).values())

    # The slow twin: each tensor of the module cast on its own.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    cast = {
        name: t.to(torch.bfloat16) if t.is_floating_point() and not name.startswith("norm") else t
        for name, t in tensors.items()
    }
    x = inputs().bfloat16()
    expected = functional_call(copy.deepcopy(module), cast, (x,))
    out = flat(params, x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)

    (gradient,) = torch.autograd.grad(out.float().square().sum(), leaf)
    expected.float().square().sum().backward()
    assert gradient.dtype == torch.float32
    for name, value in flat.named(gradient).items():
        torch.testing.assert_close(value, module.get_parameter(name).grad, rtol=1e-2, atol=1e-2)


def test_exact_batch_norm_is_worth_it() -> None:
    """Rounded scales and means are the same error at every pixel, which no average takes out."""
    x = inputs(64)
    reference, exact, rounded = (
        flat(flat.unflatten(flat.init(7)), x.to(flat.dtype)).double()
        for flat in (
            FlatModule(Small),
            FlatModule(Small, torch.bfloat16),
            FlatModule(Small, torch.bfloat16, exact=()),
        )
    )
    assert (exact - reference).norm() < (rounded - reference).norm()


def test_casting_without_batch_norm_and_float64() -> None:
    flat = FlatModule(lambda: nn.Linear(3, 2), torch.bfloat16)
    assert {p.dtype for p in flat.unflatten(flat.init(0)).values()} == {torch.bfloat16}
    exact = FlatModule(lambda: nn.Linear(3, 2))
    double = exact.init(0).double()
    assert exact(exact.unflatten(double), torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64


def test_what_stacks() -> None:
    assert FlatModule(Small).stacks
    assert FlatModule(lambda: nn.Linear(3, 2), torch.bfloat16).stacks
    assert not FlatModule(channels_last).stacks
    assert not FlatModule(Small, torch.bfloat16).stacks
