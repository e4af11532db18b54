"""Group normalization of the ConvNet's images, with candidates for the parts that programs work on."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._candidates import Case, Constant, repeated
from sandmask.functional.kernels import norm, norm_relu
from sandmask.functional.kernels.tiles import Passes

LIMITS = {2: 2e-2, 4: 5e-6}  # on relative errors, by the bytes of a number
DEVICE = "cuda"
GROUPS = 8
# Sorted by promise: the bytes in flight of all programs that fit into a multiprocessor. What spills is left out.
AHEAD = [Passes(4096, 8, 3), Passes(2048, 4, 4), Passes(2048, 4, 3), Passes(2048, 8, 4), Passes(2048, 8, 3)]
MORE = [Passes(1024, 4, 3), Passes(2048, 4, 1), Passes(2048, 8, 1), Passes(1024, 4, 1)]
PASSES = [(passes,) for passes in (*AHEAD, *MORE)]


class Sizes(NamedTuple):
    """What is normalized: images of two environments. Layers are side, channels and how many there are."""

    n_runs: int = 16
    bytes: int = 2
    images: int = 128
    layers: tuple[tuple[int, int, int], ...] = ((28, 64, 1), (14, 128, 3))
    context: tuple[int, int] = (28, 64)


class Images:
    """Images of K runs, the gradient of what they become, and their normalization."""

    def __init__(self, sizes: Sizes, side: int, channels: int) -> None:
        dtype = torch.bfloat16 if sizes.bytes == 2 else torch.float32
        shape = (sizes.n_runs, sizes.images, side, side, channels)
        self.h = torch.randn(shape, device=DEVICE).relu().to(dtype)  # as after a ReLU
        self.grad = torch.randn(shape, device=DEVICE).to(dtype)
        self.gamma, self.beta = (torch.randn(sizes.n_runs, channels, device=DEVICE).to(dtype) for _ in range(2))
        self.share = torch.rand(sizes.n_runs, 2, sizes.images // 2, device=DEVICE)
        _, self.mean, self.scale = norm.normalize(self.h, self.gamma, self.beta, GROUPS)

    def exact(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The last run's images [N, channels, height, width], gamma, beta and images that are normalized."""
        h = self.h[-1].double().permute(0, 3, 1, 2).requires_grad_()
        gamma, beta = (one[-1].double().requires_grad_() for one in (self.gamma, self.beta))
        return h, gamma, beta, F.group_norm(h, GROUPS, gamma, beta)

    def gradients(self, *, relu: bool) -> tuple[Tensor, Tensor]:
        """The gradient before the normalization, and the sums for gamma and beta over each image's pixels.

        With `relu` it is that of a ReLU after the normalization, otherwise through a ReLU before it.
        """
        h, gamma, beta, y = self.exact()
        grad = self.grad[-1].double().permute(0, 3, 1, 2)
        if relu:
            grad = torch.where(y > 0, grad, 0.0)
        (of_h,) = torch.autograd.grad(y, h, grad)
        of_h = of_h if relu else torch.where(h > 0, of_h, 0.0)
        z = (y - beta[:, None, None]) / gamma[:, None, None]
        sums = torch.stack([part.sum((2, 3)) for part in (of_h, grad * z, grad)], dim=1)
        return of_h.permute(0, 2, 3, 1).detach(), sums.detach()


def cases(sizes: Sizes) -> Iterator[Case]:
    """Forward and backward pass of the ConvNet's layers, and of ARM's context network."""
    layers = [(Images(sizes, side, channels), count) for side, channels, count in sizes.layers]
    yield from layer_cases(sizes, layers)
    yield pooled_case(sizes, layers[-1][0])
    yield from context_cases(sizes, Images(sizes, *sizes.context))


def how(sizes: Sizes, what: str, module: Any, name: str) -> dict[str, Any]:
    return {
        "name": f"{what}, {sizes.n_runs} runs, {'bf16' if sizes.bytes == 2 else 'fp32x3'}",
        "constants": (Constant(module, name, sizes.bytes),),
        "candidates": PASSES,
        "limit": LIMITS[sizes.bytes],
    }


def layer_cases(sizes: Sizes, layers: list[tuple[Images, int]]) -> Iterator[Case]:
    """All four layers of the ConvNet."""

    def forward(one: Images) -> Tensor:
        return norm.normalize(one.h, one.gamma, one.beta, GROUPS).y

    def backward(one: Images) -> tuple[Tensor, Tensor]:
        return norm.normalize_backward(one.grad, one.h, one.mean, one.scale, one.gamma, GROUPS)

    yield Case(
        launch=lambda: [repeated(count, partial(forward, one)) for one, count in layers],
        exact=lambda: tuple(one.exact()[3].detach().permute(0, 2, 3, 1) for one, _ in layers),
        **how(sizes, "normalization", norm, "FORWARD"),
    )
    yield Case(
        launch=lambda: [repeated(count, partial(backward, one)) for one, count in layers],
        results=lambda found: tuple(part[-1] for pair in found for part in pair),
        exact=lambda: tuple(part for one, _ in layers for part in one.gradients(relu=False)),
        **how(sizes, "normalization, backward", norm, "BACKWARD"),
    )


def pooled_case(sizes: Sizes, one: Images) -> Case:
    """The last layer, of which the classifier takes the mean over pixels."""
    return Case(
        launch=lambda: norm.normalize(one.h, one.gamma, one.beta, GROUPS, pooled=True).y,
        exact=lambda: (one.exact()[3].detach().mean((2, 3)),),
        **how(sizes, "normalization and mean over pixels", norm, "FORWARD"),
    )


def context_cases(sizes: Sizes, one: Images) -> Iterator[Case]:
    """ReLU and mean after the normalization."""
    own = (one.h, one.mean, one.scale, one.gamma, one.beta)

    def mean() -> tuple[Tensor, ...]:
        y = one.exact()[3].detach().relu().permute(0, 2, 3, 1)
        share = one.share[-1].double()
        return ((y.view(*share.shape, *y.shape[1:]) * share[..., None, None, None]).sum(1),)

    yield Case(
        launch=lambda: norm_relu.normalize_relu_backward(one.grad, *own, GROUPS),
        exact=lambda: one.gradients(relu=True),
        **how(sizes, "normalization and ReLU, backward", norm_relu, "BACKWARD"),
    )
    yield Case(
        launch=lambda: norm_relu.mean_of_normalized(*own, one.share, GROUPS),
        exact=mean,
        **how(sizes, "mean of normalized images", norm_relu, "MEAN"),
    )
