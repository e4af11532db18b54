"""The kernels that multiply halves (precision fp32x3), each with several tiles: error against float64, and rate.

python -m benchmarks.split_kernels [dense]     # a GPU; about a minute, most of it to compile; `dense`: the MLP only

The fastest tiles of each kernel are those that its module should have.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight
from triton.runtime.errors import OutOfResources

from benchmarks._measure import alternate, print_rows
from sandmask.functional.kernels import conv, conv_weights, moments, products
from sandmask.functional.kernels.split import split
from sandmask.functional.kernels.tiles import SPLIT, Tiles
from sandmask.training.precision import set_precision

DEVICE = "cuda"
E, IMAGES = 15, 128
SHAPES = {(128, 256): 64, (126, 512): 16, (358, 832): 16, (32, 928): 16}  # batch and width of an MLP, and runs
LAYERS = {"2": (64, 128, 28, 2), "3 and 4": (128, 128, 14, 1)}  # in, out, side, stride
PRODUCTS = [
    *((128, 64, 32, 4, 3), (128, 64, 32, 4, 4), (128, 64, 64, 4, 2), (64, 128, 64, 4, 2), (128, 128, 32, 4, 3)),
    *((128, 128, 32, 8, 3), (128, 128, 32, 8, 4), (128, 128, 64, 8, 2), (128, 128, 64, 8, 3), (128, 256, 32, 8, 3)),
]
MOMENTS = [
    *((128, 64, 128, 8, 2), (64, 64, 64, 4, 3), (64, 64, 64, 4, 2), (64, 128, 64, 8, 3), (128, 128, 64, 8, 3)),
    *((128, 64, 64, 4, 3), (128, 64, 32, 4, 4), (128, 128, 32, 8, 4), (64, 64, 32, 4, 4)),
]
WEIGHTS = [(64, 64, 64, 4, 3), (64, 64, 64, 4, 2), (128, 64, 64, 8, 3), (128, 128, 64, 8, 3)]
CONVOLUTIONS = [(128, 128, 64, 8, 3), (128, 64, 64, 4, 2), (64, 128, 64, 4, 2), (128, 64, 32, 4, 3)]
PROCESSES = 8  # that compile


@dataclass(frozen=True)
class Case:
    """A kernel, what chooses its tiles, and the same product of the first run's factors by torch's own operations."""

    name: str
    tiles: Sequence[tuple[int, int, int, int, int]]
    choose: Callable[[Tiles], None]
    action: Callable[[], Tensor]  # [K, ...]
    twin: Callable[[torch.dtype], Tensor]
    operations: float


def normal(*shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, device=DEVICE)


def dense_cases(n_runs: int, batch: int, width: int) -> Iterator[Case]:
    """The products of a hidden layer of the Spirals MLP."""
    x, weight, bias = (
        normal(n_runs, E * batch, width).relu(),
        normal(n_runs, width, width, size=1 / 16),
        normal(n_runs, width),
    )
    grad = normal(n_runs, E * batch, width, size=1e-6)
    inputs, own, gradients = split(x), split(weight), split(grad)
    targets = torch.empty(3, n_runs, width * width, device=DEVICE)
    operations = 2.0 * x.numel() * width

    def weight_moments() -> Tensor:
        moments.weight_moments(gradients, inputs, None, E, (width, width), targets)
        return targets[1].view(n_runs, width, width)

    def first(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x[0].to(dtype), weight[0].to(dtype), bias[0].to(dtype), grad[0].to(dtype)

    def forward(dtype: torch.dtype) -> Tensor:
        x, weight, bias, _ = first(dtype)
        return F.linear(x, weight, bias).relu()

    def backward(dtype: torch.dtype) -> Tensor:
        _, weight, _, grad = first(dtype)
        return grad @ weight

    def of_weight(dtype: torch.dtype) -> Tensor:
        x, _, _, grad = first(dtype)
        return grad.mT @ x

    def choose(module: object, name: str) -> Callable[[Tiles], None]:
        return lambda tiles: setattr(module, name, tiles)

    yield Case(
        *(f"layer {batch} x {width}", PRODUCTS, choose(products, "FORWARD")),
        *(lambda: products.layer(inputs, own, bias), forward, operations),
    )
    yield Case(
        *("its input's gradient", PRODUCTS, choose(products, "BACKWARD")),
        *(lambda: products.input_gradient(gradients, own), backward, operations),
    )
    yield Case(
        *("its weight's gradient", WEIGHTS, choose(products, "WEIGHTS")),
        *(lambda: products.weight_gradient(gradients, inputs), of_weight, operations),
    )
    yield Case(
        *("its weight's moments", MOMENTS, lambda tiles: moments.WEIGHT_MOMENTS.update({SPLIT: tiles}), weight_moments),
        *(lambda dtype: of_weight(dtype) / E, operations),
    )


def conv_cases(n_runs: int, name: str) -> Iterator[Case]:
    """The products of a layer of the ConvNet, with two environments."""
    n_in, n_out, side, stride = LAYERS[name]
    x, weight = normal(n_runs, IMAGES, side, side, n_in), normal(n_runs, n_out, n_in, 3, 3, size=(9 * n_in) ** -0.5)
    bias, grad = normal(n_runs, n_out), normal(n_runs, IMAGES, side // stride, side // stride, n_out, size=1e-6)
    inputs, taps, gradients = split(x), split(conv.by_tap(weight)), split(grad)
    targets = torch.empty(3, n_runs, weight[0].numel(), device=DEVICE)
    operations = 2.0 * grad.numel() * 9 * n_in
    image, of_result = x[0].permute(0, 3, 1, 2), grad[0].permute(0, 3, 1, 2)

    def weight_moments() -> Tensor:
        conv_weights.weight_moments(gradients, inputs, None, 2, stride, *targets)
        return targets[1].view(weight.shape)

    def forward(dtype: torch.dtype) -> Tensor:
        y = F.conv2d(image.to(dtype), weight[0].to(dtype), bias[0].to(dtype), stride, 1)
        return y.relu().permute(0, 2, 3, 1)

    def backward(dtype: torch.dtype) -> Tensor:
        found: Tensor = conv2d_input(image.shape, weight[0].to(dtype), of_result.to(dtype), stride, 1)  # type: ignore[no-untyped-call]
        return found.permute(0, 2, 3, 1)

    def of_weight(dtype: torch.dtype) -> Tensor:
        found: Tensor = conv2d_weight(image.to(dtype), weight[0].shape, of_result.to(dtype), stride, 1)  # type: ignore[no-untyped-call]
        return found / 2

    of_input = conv.THIN_INPUT_GRADIENT if n_in <= conv.THIN else conv.INPUT_GRADIENT

    def choose(table: dict[int, Tiles]) -> Callable[[Tiles], None]:
        return lambda tiles: table.__setitem__(SPLIT, tiles)

    yield Case(
        *(f"convolution {name}", CONVOLUTIONS, choose(conv.FORWARD)),
        *(lambda: conv.convolve(inputs, taps, bias, stride), forward, operations),
    )
    yield Case(
        *(f"its input's gradient {name}", CONVOLUTIONS, choose(of_input)),
        *(lambda: conv.input_gradient(gradients, taps, stride, torch.Size((side, side))), backward, operations),
    )
    yield Case(f"its weights' moments {name}", WEIGHTS, choose(conv_weights.FEW), weight_moments, of_weight, operations)


def cases(conv_runs: int) -> Iterator[Case]:
    """The kernels that are to be measured: of the MLP's shapes, and of the ConvNet's layers unless it has 0 runs."""
    for (batch, width), n_runs in SHAPES.items():
        yield from dense_cases(n_runs, batch, width)
    for name in LAYERS if conv_runs else ():
        yield from conv_cases(conv_runs, name)


def compile_some(part: int, conv_runs: int) -> None:
    """Launch every `PROCESSES`-th kernel once, which leaves it in Triton's cache."""
    number = 0
    for case in cases(conv_runs):
        for tiles in case.tiles:
            number += 1
            if number % PROCESSES == part:
                case.choose(Tiles(*tiles))
                with suppress(OutOfResources):
                    case.action()


def relative_error(found: Tensor, exact: Tensor) -> str:
    return f"{float((found.double() - exact).norm() / exact.norm()):.1e}"


def main() -> None:
    set_precision("fp32")
    conv_runs = 0 if "dense" in sys.argv[1:] else 16
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(compile_some, [(part, conv_runs) for part in range(PROCESSES)])
    rows: list[tuple[str, ...]] = [
        ("kernel", "tiles", "microseconds a run", "TFLOP/s", "relative error", "of plain float32")
    ]
    for case in cases(conv_runs):
        exact = case.twin(torch.float64)
        plain = relative_error(case.twin(torch.float32), exact)
        for tiles in case.tiles:
            case.choose(Tiles(*tiles))
            try:
                found = case.action()
            except OutOfResources:
                continue
            seconds = alternate({"": case.action}, repeats=3, calls=10)[""]
            rate = f"{case.operations / seconds / 1e12:.0f}"
            each = f"{1e6 * seconds / len(found):.2f}"
            rows.append((case.name, str(tiles), each, rate, relative_error(found[0], exact), plain))
    print_rows("Products of halves: layers of the Spirals MLP, batch x width, and of the ConvNet", rows)


if __name__ == "__main__":
    main()
