"""Adam as a pure function against PyTorch's."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask.functional import AdamState, adam_init, adam_reset, adam_step
from sandmask.functional.adam import plain_adam_step

N_STEPS = 25


def gradients(seed: int = 0) -> list[Tensor]:
    """Of very different sizes, and some zero."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0])
    return [torch.randn(5, generator=generator) * scales for _ in range(N_STEPS)]


def torch_adam(
    start: Tensor, steps: list[Tensor], reset_at: int | None = None, **options: float | tuple[float, float]
) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    for step, gradient in enumerate(steps):
        if step in (0, reset_at):
            optimizer = torch.optim.Adam([parameter], **options)  # type: ignore[arg-type]
        parameter.grad = gradient.to(start.dtype)
        optimizer.step()
    return parameter.detach()


def our_adam(
    start: Tensor,
    steps: list[Tensor],
    lr: Tensor | float,
    weight_decay: Tensor | float = 0.0,
    betas: tuple[Tensor | float, Tensor | float] = (0.9, 0.999),
    reset_at: Tensor | int = -1,
) -> Tensor:
    params, state = start, adam_init(start)
    for step, gradient in enumerate(steps):
        state = adam_reset(state, torch.as_tensor(reset_at) == step)
        params, state = adam_step(params, gradient.to(start.dtype), state, lr, weight_decay, betas)
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2, 1.0])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.9)])
@pytest.mark.parametrize("lr", [1e-4, 1e-1])
def test_equals_torch_adam(dtype: torch.dtype, weight_decay: float, betas: tuple[float, float], lr: float) -> None:
    start = torch.linspace(-1, 1, 5, dtype=dtype)
    expected = torch_adam(start, gradients(), lr=lr, weight_decay=weight_decay, betas=betas)
    ours = our_adam(start, gradients(), lr, weight_decay, betas)
    assert ours.dtype == dtype
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-6, 1e-7)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


def test_numbers_may_be_tensors() -> None:
    start = torch.linspace(-1, 1, 5)
    tensors = our_adam(start, gradients(), torch.tensor(0.1), torch.tensor(0.01), (torch.tensor(0.5), 0.9))
    torch.testing.assert_close(tensors, our_adam(start, gradients(), 0.1, 0.01, (0.5, 0.9)))


def test_a_reset_is_a_new_optimizer() -> None:
    start = torch.linspace(-1, 1, 5)
    ours = our_adam(start, gradients(), 0.05, 0.01, reset_at=10)
    expected = torch_adam(start, gradients(), reset_at=10, lr=0.05, weight_decay=0.01)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, torch_adam(start, gradients(), lr=0.05, weight_decay=0.01), atol=1e-3)


def test_a_reset_forgets_what_overflowed() -> None:
    large = AdamState(torch.tensor([1e19]), torch.tensor([torch.inf]), torch.tensor(7.0))
    assert [field.sum().item() for field in adam_reset(large, torch.tensor(True))] == [0.0, 0.0, 0.0]


def test_a_reset_of_a_state_gives_the_initial_one_or_the_same() -> None:
    _, state = adam_step(torch.ones(3), torch.ones(3), adam_init(torch.ones(3)), 0.1)
    for kept, same in zip(adam_reset(state, torch.tensor(False)), state, strict=True):
        assert torch.equal(kept, same)
    for fresh, first in zip(adam_reset(state, torch.tensor(True)), adam_init(torch.ones(3)), strict=True):
        assert torch.equal(fresh, first)


def test_stacked_runs_with_numbers_of_their_own_equal_those_alone() -> None:
    starts = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    rates, decays, resets = (torch.tensor(values) for values in ((0.1, 0.01, 0.001), (0.0, 0.1, 1.0), (5, 9, -1)))
    runs = [gradients(seed) for seed in range(3)]
    stacked = torch.stack([torch.stack(run) for run in runs])

    def train(start: Tensor, run: Tensor, lr: Tensor, decay: Tensor, reset_at: Tensor) -> Tensor:
        return our_adam(start, list(run), lr, decay, reset_at=reset_at)

    together = vmap(train)(starts, stacked, rates, decays, resets)
    for k in range(3):
        alone = torch_adam(
            starts[k],
            runs[k],
            reset_at=int(resets[k]),
            lr=rates[k].item(),
            weight_decay=decays[k].item(),
        )
        torch.testing.assert_close(together[k], alone, rtol=1e-5, atol=1e-6)


def test_the_arguments_are_left_alone() -> None:
    start, state = torch.ones(3), AdamState(torch.ones(3), torch.ones(3), torch.tensor(2.0))
    adam_step(start, torch.ones(3), state, 0.1, 0.1)
    assert torch.equal(start, torch.ones(3))
    assert state.count == 2
    assert torch.equal(state.mean, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torch_fused_adam_of_k_runs_is_the_plain_step_of_each(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params, gradient, mean = (torch.randn(3, 70, dtype=dtype) for _ in range(3))
    state = AdamState(mean, torch.rand(3, 70, dtype=dtype), torch.tensor([0.0, 1.0, 40.0]))
    lr, decay, beta = torch.tensor([0.1, 0.01, 1.0]), torch.tensor([0.0, 1e-3, 1.0]), torch.tensor([0.9, 0.0, 0.5])
    before = [tensor.clone() for tensor in (params, *state)]
    with torch.no_grad():
        found = vmap(lambda p, g, s, lr, decay, beta: adam_step(p, g, s, lr, decay, (beta, 0.999)))(
            params, gradient, state, lr, decay, beta
        )
        alone = adam_step(params[1], gradient[1], AdamState(*(f[1] for f in state)), lr[1], decay[1], (beta[1], 0.999))
    for run in range(3):
        of_run = AdamState(*(field[run] for field in state))
        wanted = plain_adam_step(params[run], gradient[run], of_run, lr[run], decay[run], (beta[run], 0.999))
        torch.testing.assert_close(found[0][run], wanted[0], rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(found[1], wanted[1], strict=True):
            torch.testing.assert_close(mine[run], theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(alone[0], found[0][1])
    assert all(torch.equal(old, tensor) for old, tensor in zip(before, (params, *state), strict=True))
    assert not torch.equal(found[0], params)


def test_a_step_that_autograd_follows_is_plain() -> None:
    gradient = torch.randn(4, requires_grad=True)
    params, _ = adam_step(torch.zeros(4), gradient, adam_init(torch.zeros(4)), 0.1)
    assert params.requires_grad


@pytest.mark.parametrize("plain", [False, True])
def test_decoupled_decay_is_the_one_of_torch_adamw(plain: bool) -> None:
    start = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.3)
    params, state = start, adam_init(start)
    step = plain_adam_step if plain else adam_step
    with torch.no_grad():
        for gradient in gradients():
            parameter.grad = gradient.double()
            optimizer.step()
            params, state = step(params, gradient.double(), state, 1e-2, 0.0, decoupled=0.3)
    torch.testing.assert_close(params, parameter.detach(), rtol=1e-5, atol=1e-6)  # numbers of a run are float32


def test_runs_of_a_stack_have_their_own_decoupled_decay() -> None:
    starts, decays = torch.randn(3, 5), torch.tensor([0.0, 0.1, 10.0])
    steps = gradients()

    def run(start: Tensor, decay: Tensor) -> Tensor:
        params, state = start, adam_init(start)
        for gradient in steps:
            params, state = adam_step(params, gradient, state, 1e-2, 1e-3, decoupled=decay)
        return params

    with torch.no_grad():
        together = vmap(run)(starts, decays)
        alone = torch.stack([run(start, decay) for start, decay in zip(starts, decays, strict=True)])
    torch.testing.assert_close(together, alone)
