"""The mean over pixels of a block of K runs, computed with the block, against plain operations in float64.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from sandmask.functional.conv import conv_block, plain_conv_block
from sandmask.functional.flat import Slot
from sandmask.functional.kernels import norm
from sandmask.functional.tape import MomentTape

shared = importlib.import_module("conv_kernel_checks")
kernels_here = shared.kernels_here
Block = Callable[..., Tensor]


def plain(x: Tensor, *params: Tensor, stride: int, groups: int) -> Tensor:
    weight, bias, gamma, beta = params
    return plain_conv_block(x, weight, bias, gamma, beta, stride=stride, groups=groups).mean((2, 3))


def by_kernels(x: Tensor, *params: Tensor, stride: int, groups: int) -> Tensor:
    weight, bias, gamma, beta = params
    return conv_block(x, weight, bias, gamma, beta, stride=stride, groups=groups, pooled=True)


def tolerance(case: Any, much: float) -> float:
    return much if case.dtype == torch.float32 else 4e-2


def gradients(case: Any, block: Block, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    y = vmap(lambda *own: case.apply(block, *own))(*tensors)
    return y, *torch.autograd.grad(y.double().square().sum(), tensors)


@pytest.mark.parametrize("case", [shared.CASES[0], shared.CASES[3], *shared.HALVES])
@pytest.mark.parametrize("numbers", [64, 2048])
def test_means_of_k_runs_and_their_gradients(case: Any, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, passes in norm.FORWARD.items():
        monkeypatch.setitem(norm.FORWARD, size, passes._replace(numbers=numbers))
    found = gradients(case, by_kernels, case.tensors())
    assert found[0].shape == (shared.K, case.n_samples, case.n_out)
    wanted = gradients(case, plain, [tensor.detach().double().requires_grad_() for tensor in case.tensors()])
    for one, other in zip(found, wanted, strict=True):
        shared.assert_near(one, other, tolerance(case, 1e-5))


def test_gradients_of_gradients() -> None:
    case = shared.CASES[0]

    def found(block: Block, dtype: torch.dtype) -> tuple[Tensor, ...]:
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in case.tensors()]
        y = vmap(lambda *own: case.apply(block, *own))(*tensors)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((one.square().sum() for one in first[1:]), first[0].sum()), tensors)

    for one, other in zip(found(by_kernels, torch.float32), found(plain, torch.float64), strict=True):
        shared.assert_near(one, other, 3e-5)


def test_moments_of_k_runs() -> None:
    case, n_envs = shared.Case(6, 16, 16, 5, 6, 2, 8), 2
    tensors = case.tensors(seed=1)  # with seed 0, one group hardly varies: plain float32 is off by 1e-5
    named = dict(zip(shared.NAMES, tensors[1:], strict=True))
    slots = [Slot(name, tensor.shape[1:], tensor[0].numel()) for name, tensor in named.items()]
    tape = MomentTape(slots, shared.K, n_envs, torch.empty(0, device=shared.DEVICE))

    def losses(x: Tensor, *own: Tensor) -> Tensor:
        with tape.watch(dict(zip(shared.NAMES, own, strict=True))):
            y: Tensor = case.apply(by_kernels, x, *own)
        return y.double().view(n_envs, -1).square().mean(1)

    torch.autograd.grad(vmap(losses)(*tensors).sum(), tensors, allow_unused=True)
    found = tape.moments()
    for k, wanted in enumerate(shared.moments_of_plain_blocks(case, tensors, n_envs)):
        shared.assert_near(found.mean[k], wanted.mean, 1e-5)
        shared.assert_near(found.m2[k], wanted.m2, 5e-5)


def test_what_is_no_number_stays_visible() -> None:
    tensors = [tensor.detach() for tensor in shared.CASES[0].tensors()]
    tensors[0][0, 1, 0, 3, 3] = float("nan")
    y = vmap(lambda *own: shared.CASES[0].apply(by_kernels, *own))(*tensors)
    assert y[0, 1].isnan().all()
    assert not y[0, 0].isnan().any()
    assert not y[1].isnan().any()
