"""Scaling of the logits' gradients of K runs as a GPU kernel. `functional.scaling` has the equivalent in torch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN202

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sandmask.functional.kernels.split import exponent_of, power_of
from sandmask.functional.kernels.tiles import at_most

ROWS = 64  # number of rows that a program processes at a time


@triton.jit
def _exponent(size, tiny: tl.constexpr, huge: tl.constexpr):
    """The stored exponent of a magnitude, between two limits."""
    return exponent_of(tl.minimum(tl.maximum(size, tiny), huge))


@triton.jit
def _scale_kernel(
    grad,
    out,
    unscale,
    roots,
    n_rows,
    n_classes,
    target: tl.constexpr,
    tiny: tl.constexpr,
    huge: tl.constexpr,
    least: tl.constexpr,
    rooted: tl.constexpr,
    rows: tl.constexpr,
    classes: tl.constexpr,
):
    """Scale one environment of one run. The first pass finds its largest gradient."""
    part = tl.program_id(0).to(tl.int64)
    label = tl.arange(0, classes)
    grad += part * n_rows * n_classes
    out += part * n_rows * n_classes
    roots += part * n_rows
    largest = tl.zeros((rows,), tl.float32)
    for start in range(0, n_rows, rows):
        row = start + tl.arange(0, rows)
        inside = (row < n_rows)[:, None] & (label < n_classes)[None, :]
        g = tl.load(grad + row[:, None] * n_classes + label[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(g), axis=1))
    of_env = _exponent(tl.max(largest, axis=0), tiny, huge)
    scale = power_of(target + 253 - of_env)
    tl.store(unscale + part, power_of(of_env + 1 - target))
    for start in range(0, n_rows, rows):
        row = start + tl.arange(0, rows)
        inside = (row < n_rows)[:, None] & (label < n_classes)[None, :]
        place = row[:, None] * n_classes + label[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0)
        value = g * scale
        if rooted:
            away = _exponent(tl.max(tl.abs(g), axis=1), tiny, huge) - of_env
            root = tl.maximum(((away + 2) >> 2) * 2, least)
            value *= power_of(127 - root)[:, None]
            tl.store(roots + row, power_of(127 + root), mask=row < n_rows)
        tl.store(out + place, value, mask=inside)


def scale(
    grad: Tensor, n_envs: int, target: int, limits: tuple[float, float], least: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The scaled gradients, the factors [K, E] that undo the scaling, and with `least` the roots [K, N]."""
    n_runs, n_rows, n_classes = grad.shape
    grad = grad.contiguous()
    out, unscale = torch.empty_like(grad), torch.empty(n_runs, n_envs, device=grad.device)
    roots = None if least is None else torch.empty(n_runs, n_rows, device=grad.device)
    batch = n_rows // n_envs
    launch: Any = _scale_kernel[(n_runs * n_envs,)]
    launch(
        *(grad, out, unscale, out if roots is None else roots, batch, n_classes, target, *limits, least or 0),
        rooted=roots is not None,
        rows=at_most(ROWS, batch),
        classes=int(triton.next_power_of_2(n_classes)),
    )
    return out, unscale, roots
