"""Second derivatives by kernels of K runs, against torch's own double backward in float64.

On a GPU, or in a process with TRITON_INTERPRET=1, where Triton's interpreter runs the kernels on the CPU.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from sandmask.functional.conv import conv_block, plain_conv_block
from sandmask.functional.head import fused_head
from sandmask.training.precision import temporary_precision

shared: Any = importlib.import_module("conv_kernel_checks")
kernels_here = shared.kernels_here
CASES, HALVES = shared.CASES, shared.HALVES


def gradients_of_gradients(case: Any, block: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a function of the block's gradients in which no two of their elements count the same."""
    y = vmap(lambda *own: case.apply(block, *own))(*tensors)
    generator = torch.Generator().manual_seed(2)
    y_along, *alongs = (
        torch.randn(tensor.shape, generator=generator).to(tensor) / tensor[0].numel() for tensor in (y, *tensors)
    )
    gradients = torch.autograd.grad((y.square() * y_along).sum(), tensors, create_graph=True)
    terms = [
        (gradient * along).sum() + gradient.square().sum() / gradient[0].numel()
        for gradient, along in zip(gradients, alongs, strict=True)
    ]
    return torch.autograd.grad(sum(terms, y.square().mean()), tensors)


@pytest.mark.parametrize(
    ("case", "precision"),
    [(case, "fp32") for case in CASES + HALVES] + [(case, "fp32x3") for case in (CASES[0], CASES[3])],
)
def test_gradients_of_gradients(case: Any, precision: str) -> None:
    tensors = case.tensors()
    with temporary_precision(precision):
        found = gradients_of_gradients(case, conv_block, tensors)
    wanted = gradients_of_gradients(
        case, plain_conv_block, [tensor.detach().double().requires_grad_() for tensor in tensors]
    )
    for one, other in zip(found, wanted, strict=True):
        shared.assert_near(one, other, 3e-5 if case.dtype == torch.float32 else 6e-2)


def test_gradients_of_gradients_of_the_parameters_alone() -> None:
    """The input of a network's first block has no gradient; a mean over pixels has one that all pixels share."""
    case = CASES[0]
    x, *params = case.tensors()

    def found(block: Callable[..., Tensor], exact: bool) -> tuple[Tensor, ...]:
        own = [param.double() if exact else param for param in params]
        y = vmap(lambda *own: case.apply(block, *own).mean((2, 3)))(x.detach().to(own[0]), *own)
        gradients = torch.autograd.grad(y.square().sum(), params, create_graph=True)
        return torch.autograd.grad(sum((one.square().sum() for one in gradients[1:]), gradients[0].sum()), params)

    wanted = found(plain_conv_block, exact=True)
    for one, other in zip(found(conv_block, exact=False), wanted, strict=True):
        shared.assert_near(one, other, 3e-5)


def test_what_is_no_number_stays_visible_in_second_derivatives() -> None:
    case = CASES[0]
    tensors = [tensor.detach() for tensor in case.tensors()]
    tensors[0][0, 1, 0, 3, 3] = float("nan")
    for gradient in gradients_of_gradients(case, conv_block, [tensor.requires_grad_() for tensor in tensors]):
        assert gradient[0].isnan().any()
        assert not gradient[1].isnan().any()


def test_third_derivatives_are_refused() -> None:
    case = CASES[0]
    tensors = case.tensors()
    y = vmap(lambda *own: case.apply(conv_block, *own))(*tensors)
    gradient = torch.autograd.grad(y.square().sum(), tensors[1], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="third derivatives"):
        torch.autograd.grad(gradient.square().sum(), tensors[1], create_graph=True)


def test_gradients_of_gradients_of_a_classifier() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 18), (3, 18), (3,))
    x, *own = (torch.randn(shared.K, *shape, generator=generator).to(shared.DEVICE) for shape in shapes)
    tensors = [tensor.requires_grad_() for tensor in (F.pad(x, (0, 14)), *own)]

    def found(head: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        risk = vmap(head)(*tensors).logsumexp(-1).sum()
        gradients = torch.autograd.grad(risk, tensors, create_graph=True)
        return torch.autograd.grad(sum((one.square().sum() for one in gradients[1:]), gradients[0].sum()), tensors)

    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = found(lambda x, weight, bias: F.linear(x[..., :18], weight, bias), exact)
    for one, other in zip(found(fused_head, tensors), wanted, strict=True):
        shared.assert_near(one, other, 1e-5)
