"""The convolutions of the MNIST ConvNet and of ARM's context network, with candidates for their tiles."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from benchmarks._candidates import Case, Constant, repeated
from sandmask.functional.kernels import conv, conv_weights
from sandmask.functional.kernels.split import split
from sandmask.functional.kernels.tiles import SPLIT, Tiles
from sandmask.functional.split import Halves

LIMITS = {2: 2e-2, SPLIT: 5e-6}  # on relative errors, by the kind of numbers
DEVICE = "cuda"
Candidates = dict[int, list[tuple[Any, ...]]]  # by the kind of numbers
# Tiles, and the least number of programs.
WEIGHTS: Candidates = {
    2: [
        *((None, 1), (None, 200), (None, 800), (Tiles(128, 128, 64, 8, 3), None), (Tiles(128, 128, 64, 8, 3), 200)),
        *((Tiles(128, 64, 64, 4, 4), None), (Tiles(64, 64, 64, 4, 4), None)),
    ],
    SPLIT: [
        *((None, 1), (None, 200), (None, 800), (Tiles(128, 64, 64, 8, 3), None), (Tiles(128, 64, 64, 4, 2), None)),
        *((Tiles(64, 64, 64, 4, 3), None),),
    ],
}
CONTEXT: Candidates = {
    2: [*((None, 1), (None, 200), (None, 800), (Tiles(64, 64, 64, 4, 3), None), (Tiles(64, 64, 128, 4, 2), None))],
    SPLIT: [*((None, 1), (None, 200), (None, 800), (Tiles(64, 64, 32, 4, 4), None), (Tiles(64, 64, 64, 4, 2), None))],
}
THIN = {
    2: [
        *(Tiles(256, 64, 64, 8, 3), Tiles(128, 64, 64, 4, 3), Tiles(256, 64, 64, 8, 4), Tiles(128, 64, 64, 4, 4)),
        *(Tiles(256, 64, 32, 8, 4), Tiles(128, 64, 64, 8, 4)),
    ],
    SPLIT: [Tiles(128, 128, 64, 8, 3), Tiles(128, 64, 64, 8, 2), Tiles(128, 64, 32, 4, 4)],
}


class Layer(NamedTuple):
    """A convolution: channels of input and output, and side of the images, stride, and side of the filter."""

    n_in: int
    n_out: int
    side: int
    stride: int
    filter: int = 3


class Sizes(NamedTuple):
    """A stack: runs, kind of numbers, images, layers with the number of their launches, and layers of ARM's context."""

    n_runs: int = 16
    kind: int = 2
    images: int = 128  # of two environments
    layers: tuple[tuple[Layer, int], ...] = ((Layer(64, 128, 28, 2), 1), (Layer(128, 128, 14, 1), 2))
    context: Layer = Layer(64, 64, 28, 1, 5)
    first: Layer = Layer(2, 64, 28, 1)


class Tensors:
    """The tensors of a convolution of K runs, also in the layout that the kernels take."""

    def __init__(self, sizes: Sizes, layer: Layer) -> None:
        n_in, n_out, side, self.stride, taps = layer
        half = (side - 1) // self.stride + 1
        self.padding = taps // 2
        self.sides = torch.Size((side, side))
        n_runs, images = sizes.n_runs, sizes.images
        dtype = torch.bfloat16 if sizes.kind == 2 else torch.float32
        self.x = torch.randn(n_runs, images, side, side, n_in, device=DEVICE).to(dtype)
        self.weight = (torch.randn(n_runs, n_out, n_in, taps, taps, device=DEVICE) / (taps * n_in**0.5)).to(dtype)
        self.bias = torch.randn(n_runs, n_out, device=DEVICE).to(dtype)
        self.grad = torch.randn(n_runs, images, half, half, n_out, device=DEVICE).to(dtype)
        self.taps = self.factor(conv.by_tap(self.weight), sizes.kind)
        self.inputs, self.gradients = self.factor(self.x, sizes.kind), self.factor(self.grad, sizes.kind)

    @staticmethod
    def factor(x: Tensor, kind: int) -> Tensor | Halves:
        return split(x) if kind == SPLIT else x

    def last(self, tensor: Tensor) -> Tensor:
        """Return the last run's images [N, channels, height, width], or its weights, in float64."""
        own = tensor[-1].double()
        return own if tensor is self.weight else own.permute(0, 3, 1, 2)

    def forward(self) -> Tensor:
        """Compute relu(conv(x) + bias) of the last run."""
        own = (self.last(self.x), self.last(self.weight), self.bias[-1].double())
        return F.conv2d(*own, self.stride, self.padding).relu().permute(0, 2, 3, 1)

    def of_input(self) -> Tensor:
        x, weight, grad = self.last(self.x), self.last(self.weight), self.last(self.grad)
        found: Tensor = conv2d_input(x.shape, weight, grad, self.stride, self.padding)  # type: ignore[no-untyped-call]
        return found.permute(0, 2, 3, 1)

    def of_weight(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Compute the gradient of the weights from some images."""
        x, grad = self.last(self.x)[begin:end], self.last(self.grad)[begin:end]
        found: Tensor = conv2d_weight(x, self.weight.shape[1:], grad, self.stride, self.padding)  # type: ignore[no-untyped-call]
        return found


def cases(sizes: Sizes) -> Iterator[Case]:
    """Yield the cases, those with most to gain first: gradients of weights."""
    layers = [(Tensors(sizes, layer), count) for layer, count in sizes.layers]
    yield weight_gradients(sizes, layers)
    yield weight_moments(sizes, layers)
    context = Tensors(sizes, sizes.context)
    yield context_weights(sizes, context)
    yield from thin_cases(sizes, context, layers[0][0])


def named(sizes: Sizes, what: str) -> str:
    return f"{what}, {sizes.n_runs} runs, {'fp32x3' if sizes.kind == SPLIT else 'bf16'}"


def weight_gradients(sizes: Sizes, layers: list[tuple[Tensors, int]]) -> Case:
    """Gradients of the weights of layers 2 to 4 from all images, as most algorithms need them."""
    return Case(
        name=named(sizes, "gradients of weights"),
        constants=(Constant(conv_weights, "TILES", sizes.kind), Constant(conv_weights, "PROGRAMS")),
        candidates=WEIGHTS[sizes.kind],
        launch=lambda: [repeated(count, partial(gradient_of, layer)) for layer, count in layers],
        exact=lambda: tuple(layer.of_weight() for layer, _ in layers),
        limit=LIMITS[sizes.kind],
    )


def gradient_of(layer: Tensors) -> Tensor:
    return conv_weights.weight_gradient(layer.gradients, layer.inputs, layer.weight, layer.stride)


def weight_moments(sizes: Sizes, layers: list[tuple[Tensors, int]]) -> Case:
    """Moments of the same over two environments, for masks."""
    buffers = [torch.empty(3, sizes.n_runs, layer.weight[0].numel() + 6, device=DEVICE) for layer, _ in layers]

    def launch() -> list[Tensor]:
        for (layer, count), buffer in zip(layers, buffers, strict=True):
            own = (layer.gradients, layer.inputs, None, 2, layer.stride, buffer[..., :-6])
            repeated(count, partial(conv_weights.weight_moments, *own))
        return buffers

    def exact() -> tuple[Tensor, ...]:
        half, found = sizes.images // 2, []
        for layer, _ in layers:
            one, two = (layer.of_weight(begin, begin + half).flatten() for begin in (0, half))
            found += [(one + two) / 2, (one - two).square() / 2]
        return tuple(found)

    return Case(
        name=named(sizes, "moments of weights"),
        constants=(Constant(conv_weights, "TILES", sizes.kind), Constant(conv_weights, "PROGRAMS")),
        candidates=WEIGHTS[sizes.kind],
        launch=launch,
        results=lambda found: tuple(part[-1, :-6] for buffer in found for part in buffer[1:]),
        exact=exact,
        limit=2 * LIMITS[sizes.kind],  # M2 is a square
        written=tuple(buffers),
    )


def context_weights(sizes: Sizes, context: Tensors) -> Case:
    """The gradient of 5 x 5 filters over large images, in parts."""
    return Case(
        name=named(sizes, "gradient of the context's weights"),
        constants=(Constant(conv_weights, "THIN_TILES", sizes.kind), Constant(conv_weights, "PROGRAMS")),
        candidates=CONTEXT[sizes.kind],
        launch=partial(gradient_of, context),
        exact=lambda: (context.of_weight(),),
        limit=LIMITS[sizes.kind],
    )


def thin_cases(sizes: Sizes, context: Tensors, second: Tensors) -> Iterator[Case]:
    """Convolutions with few channels: of the context network, and of layer 1 or the gradient of layer 2's input."""
    first = Tensors(sizes, sizes.first)

    def case(what: str, launch: Callable[[], Any], exact: Callable[[], tuple[Tensor, ...]]) -> Case:
        return Case(
            name=named(sizes, what),
            constants=(Constant(conv, "THIN_TILES", sizes.kind),),
            candidates=[(tiles,) for tiles in THIN[sizes.kind]],
            launch=launch,
            exact=exact,
            limit=LIMITS[sizes.kind],
        )

    def forward(layer: Tensors) -> Tensor:
        return conv.convolve(layer.inputs, layer.taps, layer.bias, layer.stride)

    def backward(layer: Tensors) -> Tensor:
        return conv.input_gradient(layer.gradients, layer.taps, layer.stride, layer.sides)

    yield case(
        *("context and layer 1", lambda: (forward(context), forward(first))),
        exact=lambda: (context.forward(), first.forward()),
    )
    yield case(
        *("input of context and layer 2", lambda: (backward(context), backward(second))),
        exact=lambda: (context.of_input(), second.of_input()),
    )
