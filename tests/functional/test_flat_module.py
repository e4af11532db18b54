"""Modules as functions of one flat vector, against the modules themselves."""

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from sandmask.functional import FlatModule


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def module_after(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def test_it_starts_and_computes_as_the_module_does() -> None:
    flat, x = FlatModule(build), torch.randn(5, 4)
    vector = flat.init(3)
    assert vector.shape == (flat.numel,)
    torch.testing.assert_close(flat(flat.unflatten(vector), x), module_after(3)(x).detach())


def test_names_and_shapes_are_the_modules_and_views_share_memory() -> None:
    flat, module = FlatModule(build), module_after(0)
    vector = flat.init(0)
    params = flat.unflatten(vector)
    for name, parameter in module.named_parameters():
        assert torch.equal(params[name], parameter)
    vector.zero_()
    assert not any(p.any() for p in params.values())


def test_flattening_is_the_inverse() -> None:
    flat = FlatModule(build)
    vector = flat.init(1)
    assert torch.equal(flat.flatten(flat.named(vector)), vector)


def test_values_of_environments_are_joined_in_parts() -> None:
    """Convolutions in channels-last and float16 next to float32; stacked values and lists of them."""

    def mixed() -> nn.Module:
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
        module.memory_format = torch.channels_last  # type: ignore[assignment]
        return module

    flat = FlatModule(mixed, torch.float16)
    params = flat.unflatten(flat.init(0))
    lists = {name: [param * e for e in range(3)] for name, param in params.items()}
    stacked = {name: torch.stack(values) for name, values in lists.items()}
    expected = flat.flatten_each(stacked)
    for named in (lists, stacked):
        parts = flat.join_each(named)
        assert [part.dtype for part in parts] == [torch.float16, torch.float32]
        assert torch.equal(torch.cat([part.float() for part in parts], dim=1), expected)


def test_gradients_by_the_vector_are_the_modules() -> None:
    flat, module, x = FlatModule(build), module_after(2), torch.randn(5, 4)

    def loss(vector: Tensor) -> Tensor:
        return flat(flat.unflatten(vector), x).square().sum()

    module(x).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(grad(loss)(flat.init(2)), expected)
    leaf = flat.init(2).requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], expected)


def test_a_stack_of_vectors_is_a_stack_of_modules() -> None:
    flat, x = FlatModule(build), torch.randn(3, 5, 4)
    vectors = torch.stack([flat.init(seed) for seed in range(3)])
    together = vmap(lambda vector, x: flat(flat.unflatten(vector), x))(vectors, x)
    for seed in range(3):
        torch.testing.assert_close(together[seed], module_after(seed)(x[seed]).detach())


def test_building_and_starting_draw_nothing_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    flat = FlatModule(build)
    flat.init(5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(flat.init(5), flat.init(5))
    assert not torch.equal(flat.init(5), flat.init(6))


def test_frozen_statistics_are_constants_and_not_in_the_vector() -> None:
    def with_norm() -> nn.Module:
        norm = nn.BatchNorm1d(4)
        norm.running_mean = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return nn.Sequential(nn.Linear(4, 4), norm.eval())

    flat, x = FlatModule(with_norm), torch.randn(5, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = with_norm()
    vector = flat.init(0)
    assert flat.numel == sum(p.numel() for p in module.parameters())
    torch.testing.assert_close(flat(flat.unflatten(vector), x), module(x).detach())
    for name, parameter in module.named_parameters():
        assert torch.equal(flat.named(vector)[name], parameter)


def test_tied_weights_stay_tied() -> None:
    def tied() -> nn.Module:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), nn.ModuleDict({"last": last})["last"])

    flat, x = FlatModule(tied), torch.randn(5, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = tied()
    vector = flat.init(0).requires_grad_()
    output = flat(flat.unflatten(vector), x)
    torch.testing.assert_close(output, module(x))
    grads = dict(
        zip(
            [name for name, _ in module.named_parameters()],
            torch.autograd.grad(module(x).sum(), [*module.parameters()]),
            strict=True,
        )
    )
    torch.testing.assert_close(torch.autograd.grad(output.sum(), vector)[0], flat.flatten(grads))


def test_random_constants_do_not_depend_on_the_global_generator() -> None:
    """Otherwise a run would be resumed, or repeated, with other constants than it began with."""

    def features() -> nn.Module:
        frozen = nn.Linear(4, 8).requires_grad_(False)
        frozen.register_buffer("shift", torch.rand(8))
        return nn.Sequential(frozen, nn.Linear(8, 2))

    with torch.random.fork_rng(devices=[]):
        first = FlatModule(features).constants
        torch.rand(1)
        second = FlatModule(features).constants
    assert list(first) == ["0.weight", "0.bias", "0.shift"]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
