"""The kernels of the Spirals MLP in fp32x3, with candidates for their tiles."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks._candidates import Case, Constant
from sandmask.functional.kernels import dense, head, moments, products
from sandmask.functional.kernels import split as halves
from sandmask.functional.kernels.tiles import SPLIT, Block, Tiles
from sandmask.functional.split import Halves, joined, largest_of, remember_largest

LIMIT = 5e-6  # on relative errors; those of float32 are about 2e-7, those of TF32 3e-4
DEVICE = "cuda"
# Sorted by promise: the bytes in flight of all programs that fit into a multiprocessor. What spills is left out.
NARROW_MOMENTS = [
    *(Tiles(64, 32, 16, 4, 6), Tiles(64, 32, 32, 8, 4), Tiles(32, 32, 16, 4, 8), Tiles(64, 32, 32, 4, 4)),
    *(Tiles(32, 32, 32, 4, 4), Tiles(64, 64, 32, 4, 4)),
]
WIDE_MOMENTS = [
    *(Tiles(64, 64, 32, 4, 5), Tiles(32, 64, 32, 4, 4), Tiles(64, 64, 16, 4, 6), Tiles(32, 64, 64, 4, 3)),
    *(Tiles(64, 64, 64, 4, 3), Tiles(64, 64, 128, 4, 2), Tiles(64, 128, 32, 8, 4), Tiles(32, 64, 128, 4, 3)),
]
NARROW_LAYER = [
    *(Tiles(64, 32, 32, 4, 1), Tiles(32, 64, 32, 4, 1), Tiles(128, 64, 32, 8, 1), Tiles(32, 128, 32, 4, 1)),
    *(Tiles(16, 256, 32, 4, 1), Tiles(64, 64, 32, 8, 1), Tiles(64, 32, 32, 2, 1), Tiles(32, 256, 32, 8, 1)),
]
GRADIENTS = [
    *(Tiles(64, 64, 64, 4, 3), Tiles(32, 64, 64, 4, 3), Tiles(32, 64, 64, 2, 4), Tiles(16, 128, 64, 4, 3)),
    *(Tiles(16, 64, 64, 4, 4), Tiles(16, 64, 64, 2, 3)),
]
LOGITS = [Tiles(64, 64, 32, 4, 4), Tiles(64, 64, 32, 4, 6), Tiles(128, 64, 32, 4, 4), Tiles(64, 64, 64, 4, 4)]
OUTER = [
    *(Tiles(32, 64, 1, 4, 3), Tiles(16, 64, 1, 4, 3), Tiles(16, 32, 1, 2, 3), Tiles(8, 64, 1, 2, 3)),
    *(Tiles(16, 128, 1, 4, 3), Tiles(32, 32, 1, 2, 3), Tiles(8, 256, 1, 4, 3)),
]
PRODUCTS = [
    *(Tiles(128, 64, 32, 4, 4), Tiles(64, 64, 32, 4, 3), Tiles(64, 64, 32, 4, 4), Tiles(128, 64, 32, 8, 3)),
    *(Tiles(128, 64, 32, 8, 4), Tiles(64, 128, 32, 4, 3), Tiles(64, 128, 32, 4, 4), Tiles(128, 128, 32, 8, 4)),
    *(Tiles(128, 64, 32, 4, 3), Tiles(128, 128, 64, 8, 3)),
]
ACTIVATE = [Tiles(16, 128, 1, 4, 3), Tiles(32, 64, 1, 4, 3), Tiles(32, 128, 1, 8, 3), Tiles(16, 128, 1, 8, 3)]
BLOCKS = [Block(512, 4), Block(2048, 4), Block(1024, 8)]


class Sizes(NamedTuple):
    """What a stack trains on, and its layers; two classes."""

    n_runs: int = 256
    n_envs: int = 16
    batch: int = 128
    n_in: int = 18
    width: int = 256

    @property
    def rows(self) -> int:
        return self.n_envs * self.batch


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def of_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The last run's numbers in float64."""
    return tuple(tensor[-1].double() for tensor in tensors)


def last_of_halves(found: Halves) -> Tensor:
    return joined(Halves(found.values[-1:], found.largest[-1:]))[0]


def one(module: Any, name: str, tiles: list[Any], key: int | None = None) -> dict[str, Any]:
    """The arguments of a case of one constant."""
    return {"constants": (Constant(module, name, key),), "candidates": [(each,) for each in tiles], "limit": LIMIT}


def cases(sizes: Sizes) -> Iterator[Case]:
    """The kernels that a training step launches, those with most to gain first."""
    yield from moment_cases(sizes)
    yield narrow_layer(sizes)
    yield from head_cases(sizes)
    yield outer_moments(sizes)
    yield from product_cases(sizes)
    yield from activation_cases(sizes)


def scales(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """What undoes the scaling of gradients: by environment, and the roots of rows."""
    unscale = torch.exp2(torch.randint(-3, 4, (sizes.n_runs, sizes.n_envs), device=DEVICE).float())
    roots = torch.exp2(2.0 * torch.randint(-3, 1, (sizes.n_runs, sizes.rows), device=DEVICE).float())
    return unscale, roots


def moments_of(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and M2 of gradients [E, ...]."""
    mean = gradients.mean(0)
    return mean.flatten(), (gradients - mean).square().sum(0).flatten()


def places(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """A buffer of moments of all parameters, and the parts of the first and the second layer's weights in it."""
    first, second = sizes.n_in * sizes.width, sizes.width**2
    begin = first + sizes.width
    numel = begin + 2 * (second + sizes.width) + 2 * sizes.width + 2
    buffers = torch.empty(3, sizes.n_runs, numel, device=DEVICE)
    return buffers, buffers[..., :first], buffers[..., begin : begin + second]


def moment_cases(sizes: Sizes) -> Iterator[Case]:
    """Moments of the first layer's weights, from float32, and of the second layer's, from halves."""
    n_runs, width = sizes.n_runs, sizes.width
    unscale, roots = scales(sizes)
    buffers, first, second = places(sizes)
    grad = normal(n_runs, sizes.rows, width)
    inputs = dense.pad(normal(n_runs, sizes.rows, sizes.n_in), sizes.rows, -sizes.n_in % 16 + sizes.n_in)
    hidden = normal(n_runs, sizes.rows, width).relu()

    def launch(grad: Tensor | Halves, x: Tensor | Halves, n_in: int, target: Tensor) -> Tensor:
        moments.weight_moments(grad, x, unscale, sizes.n_envs, (width, n_in), target, roots)
        return target

    def exact(x: Tensor, n_in: int) -> tuple[Tensor, ...]:
        g, own, root, factor = of_last(grad, x[..., :n_in], roots, unscale)
        left, right = (rows.view(sizes.n_envs, sizes.batch, -1) for rows in (g * root[:, None], own))
        return moments_of(left.mT @ right * factor[:, None, None])

    def case(name: str, how: dict[str, Any], grad: Any, x: Any, own: Tensor, n_in: int, target: Tensor) -> Case:
        return Case(
            name=name,
            launch=lambda: launch(grad, x, n_in, target),
            results=lambda found: tuple(found[1:, -1]),
            exact=lambda: exact(own, n_in),
            written=(buffers,),
            **how,
        )

    narrow = one(moments, "NARROW_WEIGHT_MOMENTS", NARROW_MOMENTS, 4)
    yield case(f"moments of {sizes.n_in} x {width} weights", narrow, grad, inputs, inputs, sizes.n_in, first)
    wide = one(moments, "WEIGHT_MOMENTS", WIDE_MOMENTS, SPLIT)
    factors = (halves.split(grad), halves.split(hidden))
    yield case(f"moments of {width} x {width} weights", wide, *factors, hidden, width, second)


def narrow_layer(sizes: Sizes) -> Case:
    """The first layer; its parameters are parts of a long vector."""
    n_runs, width, n_in = sizes.n_runs, sizes.width, sizes.n_in
    vectors = normal(n_runs, (n_in + 1) * width + 2)
    weight, bias = vectors[:, : n_in * width].view(n_runs, width, n_in), vectors[:, n_in * width : -2]
    x, keys = normal(n_runs, sizes.rows, n_in), torch.zeros(n_runs, sizes.rows, dtype=torch.int64, device=DEVICE)
    rate = torch.zeros(n_runs, device=DEVICE)

    def exact() -> tuple[Tensor, ...]:
        x_last, weight_last, bias_last = of_last(x, weight, bias)
        return ((x_last @ weight_last.mT + bias_last).relu(),)

    return Case(
        name=f"layer of {n_in} inputs",
        launch=lambda: dense.narrow_layer(x, weight, bias, keys, rate, 0, width),
        exact=exact,
        **one(dense, "NARROW", NARROW_LAYER),
    )


def head_cases(sizes: Sizes) -> Iterator[Case]:
    """The last layers as one: logits, and both gradients."""
    n_runs, width = sizes.n_runs, sizes.width
    x, weight, bias = normal(n_runs, sizes.rows, width).relu(), normal(n_runs, 2, width), normal(n_runs, 2)
    grad, weighted = normal(n_runs, sizes.rows, 2), normal(n_runs, sizes.rows, 2)

    def exact_gradients() -> tuple[Tensor, ...]:
        g, h, features, own = of_last(grad, weighted, x, weight)
        left, right = (rows.view(sizes.n_envs, sizes.batch, -1) for rows in (h, features))
        return g @ own, left.mT @ right

    def exact_logits() -> tuple[Tensor, ...]:
        features, own, constant = of_last(x, weight, bias)
        return (features @ own.mT + constant,)

    yield Case(
        name="gradients of the classifier",
        launch=lambda: head.gradients(grad, x, weight, sizes.batch, weighted),
        exact=exact_gradients,
        **one(head, "GRADIENTS", GRADIENTS),
    )
    yield Case(
        name="logits",
        launch=lambda: head.logits(x, weight, bias),
        exact=exact_logits,
        **one(head, "LOGITS", LOGITS),
    )


def outer_moments(sizes: Sizes) -> Case:
    """Moments of the last but one layer, from outer products."""
    v, p = normal(sizes.n_runs, 2, sizes.width), normal(sizes.n_runs, sizes.n_envs, 2, sizes.width)
    unscale, _ = scales(sizes)
    buffers, _, target = places(sizes)

    def launch() -> Tensor:
        moments.outer_moments(v, p, unscale, target)
        return target

    def exact() -> tuple[Tensor, ...]:
        own, parts, factor = of_last(v, p, unscale)
        return moments_of(own.mT @ parts * factor[:, None, None])

    return Case(
        name="moments of outer products",
        launch=launch,
        results=lambda found: tuple(found[1:, -1]),
        exact=exact,
        written=(buffers,),
        **one(moments, "OUTER_MOMENTS", OUTER),
    )


def product_cases(sizes: Sizes) -> Iterator[Case]:
    """The second layer, and the gradient of its input, by halves."""
    n_runs, width = sizes.n_runs, sizes.width
    x, weight, bias = normal(n_runs, sizes.rows, width).relu(), normal(n_runs, width, width), normal(n_runs, width)
    keys, rate = torch.zeros(n_runs, sizes.rows, dtype=torch.int64, device=DEVICE), torch.zeros(n_runs, device=DEVICE)
    inputs, own = halves.split(x), halves.split(weight)

    def forward() -> tuple[Tensor, ...]:
        a, b, c = of_last(x, weight, bias)
        return ((a @ b.mT + c).relu(),)

    def backward() -> tuple[Tensor, ...]:
        a, b = of_last(x, weight)
        return (a @ b,)

    layer = partial(products.layer, inputs, own, bias, keys, rate)
    yield Case(f"layer of {width} inputs", launch=layer, exact=forward, **one(products, "FORWARD", PRODUCTS))
    gradient = partial(products.input_gradient, inputs, own)
    how = one(products, "BACKWARD", PRODUCTS)
    yield Case(f"gradient of {width} inputs", launch=gradient, exact=backward, **how)


def activation_cases(sizes: Sizes) -> Iterator[Case]:
    """The backward pass of both activations, and the splitting of numbers into halves."""
    n_runs, width = sizes.n_runs, sizes.width
    grad, out = normal(n_runs, sizes.rows, width), normal(n_runs, sizes.rows, width).relu()
    rate, (_, roots) = torch.zeros(n_runs, device=DEVICE), scales(sizes)
    remember_largest(grad, largest_of(grad))
    how = (rate, sizes.batch, roots)

    def launch() -> Any:
        return *dense.activate_backward_halves(grad, out, *how), *dense.activate_backward(grad, out, *how)

    def exact() -> tuple[Tensor, ...]:
        g, y, root = of_last(grad, out, roots)
        before = torch.where(y > 0, g, 0.0)
        sums = (before * root[:, None]).view(sizes.n_envs, sizes.batch, -1).sum(1)
        return before, sums, before, sums

    yield Case(
        name="backward pass of two activations",
        launch=launch,
        results=lambda found: (last_of_halves(found[0]), found[1][-1], found[2][-1], found[3][-1]),
        exact=exact,
        **one(dense, "ACTIVATE_BACKWARD", ACTIVATE),
    )
    yield Case(
        name="splitting into halves",
        launch=lambda: halves.split(grad),
        results=lambda found: (last_of_halves(found),),
        exact=lambda: of_last(grad),
        **one(halves, "BLOCK", BLOCKS),
    )
