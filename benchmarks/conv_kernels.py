"""Time and utilization of each kernel of the MNIST ConvNet's layers for K runs.

python -m benchmarks.conv_kernels [K] [EXAMPLES]     # a GPU; 16 runs of 2 environments of 64 examples
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks._measure import alternate, print_rows
from sandmask.functional.kernels import conv as conv_kernels
from sandmask.functional.kernels import conv_weights, norm

LAYERS = {"1": (2, 64, 28, 1), "2": (64, 128, 28, 2), "3 and 4": (128, 128, 14, 1)}  # in, out, side, stride
N_ENVS, GROUPS = 2, 8
DEVICE = "cuda"
DTYPE = torch.bfloat16
Action = tuple[str, Callable[[], object], float, float]  # name, what to time, operations, bytes


def actions(n_runs: int, n_samples: int, layer: tuple[int, int, int, int]) -> Iterator[Action]:
    """Yield the kernels that a training step launches for a layer."""
    n_in, n_out, side, stride = layer

    def normal(*shape: int) -> Tensor:
        return torch.randn(n_runs, *shape, device=DEVICE, dtype=DTYPE)

    x, weight = normal(n_samples, side, side, n_in), normal(n_out, n_in, 3, 3)
    bias, gamma, beta = (normal(n_out) for _ in range(3))
    taps = conv_kernels.by_tap(weight)
    h = conv_kernels.convolve(x, taps, bias, stride)
    grad = torch.randn_like(h)
    _, mean, scale = norm.normalize(h, gamma, beta, GROUPS)
    buffers = torch.empty(3, n_runs, weight[0].numel(), device=DEVICE)
    product = 2.0 * h.numel() * 9 * n_in

    yield "order of the weights", lambda: conv_kernels.by_tap(weight), 0.0, 2.0 * weight.nbytes
    forward = x.nbytes + h.nbytes
    yield "convolution", lambda: conv_kernels.convolve(x, taps, bias, stride), product, forward
    yield "norm", lambda: norm.normalize(h, gamma, beta, GROUPS), 0.0, 2.0 * h.nbytes
    backward = (mean, scale, gamma, GROUPS)
    yield "norm, backward", lambda: norm.normalize_backward(grad, h, *backward), 0.0, 3.0 * h.nbytes
    moments = (None, N_ENVS, stride, buffers)
    yield "moments of the weights", lambda: conv_weights.weight_moments(grad, x, *moments), product, forward
    sides = torch.Size((side, side))
    yield "input", lambda: conv_kernels.input_gradient(grad, taps, stride, sides), product, forward


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    n_runs, examples = given + [16, 64][len(given) :]
    rows: list[tuple[str, ...]] = [("layer", "what", "microseconds a run", "TFLOP/s", "TB/s")]
    total = 0.0
    for name, layer in LAYERS.items():
        for what, action, operations, moved in actions(n_runs, N_ENVS * examples, layer):
            seconds = alternate({what: action}, repeats=7, calls=10)[what]
            total += seconds * (2 if "and" in name else 1)
            rates = (f"{operations / seconds / 1e12:.0f}" if operations else "", f"{moved / seconds / 1e12:.2f}")
            rows.append((name, what, f"{1e6 * seconds / n_runs:.1f}", *rates))
    title = (
        f"{n_runs} runs, {N_ENVS} environments of {examples} examples: {1e6 * total / n_runs:.0f} microseconds a run"
    )
    print_rows(f"{title} and step, in these kernels", rows)


if __name__ == "__main__":
    main()
