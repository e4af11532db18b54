"""Check that examples pass through a model independently of each other: their gradients, and their outputs."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sandmask.gradients._tape import UnsupportedError

# How much an output may differ if a batch has more examples, relative to the largest: other kernels may compute it.
_OUTPUT_TOLERANCE = 1e-2
_OUTPUT_TOLERANCE_HALF = 1e-1

# How much a gradient may change if the losses of other environments change, relative to its size. Kernels that add up
# in any order change it by rounding errors.
_TOLERANCE = 1e-4
_TOLERANCE_HALF = 2e-2
_FACTORS = (0.0, 1.0, 0.5, 0.25)


class IndependenceCheck:
    """Compares two backward passes: one of the losses, and one of the losses times a different factor each.

    Where examples are independent of each other, the gradient of a row is multiplied by the factor of its environment.
    Factors are zero and powers of two, so that this is exact. Where it is zero, the smallest gradient of another
    environment is noticed. Only two numbers of each example are kept. Nothing is compared before `activate`.

    A tensor whose gradient is zero, as behind a factor that starts at zero, or not finite, as after an overflow, tells
    nothing: `told` leaves it out.

    :param sizes: number of examples of each environment.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._active: list[bool] = []
        self._factors = [_FACTORS[(e + e // 4 + e // 16) % 4] for e in range(len(sizes))]
        self._sizes = list(sizes)
        self._seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        # The smallest number of full precision in any tensor: multiples of smaller ones, of float16, are not exact.
        self._tiny = 0.0

    def watch(self, output: Tensor, number: int) -> None:
        """Compare the gradients of this tensor, which has a row per example, or several."""
        seen = self._seen[number] = []
        self._tiny = max(self._tiny, torch.finfo(output.dtype).tiny)
        output.register_hook(partial(_note, seen, self._active, sum(self._sizes)))  # type: ignore[no-untyped-call]

    def watched(self) -> set[int]:
        """The numbers of the tensors."""
        return set(self._seen)

    def activate(self) -> None:
        """Called before the two backward passes."""
        self._active.append(True)

    def weighted(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """The losses of the first backward pass; the second is that of the losses themselves."""
        return [loss * factor for loss, factor in zip(losses, self._factors, strict=True)]

    def passed(self) -> bool:
        """Whether no row's gradient depends on the loss of another environment. Called after both passes.

        What is not finite passes: it has an error of its own.
        """
        mixed, of_rows = [], torch.tensor(self._factors).repeat_interleave(torch.tensor(self._sizes))
        for (weighted, _, _), (plain, tolerance, size) in (seen for seen in self._seen.values() if seen):
            factors = of_rows.to(plain)
            allowed = (tolerance + size * self._tiny) * (factors > 0)
            mixed.append(((weighted - plain * factors).abs() > allowed).any())
        return not any(bool(each) for each in mixed)

    def told(self) -> set[int]:
        """The numbers of the tensors whose gradients were compared. Called after both passes."""
        sizes = {number: seen[-1][1].sum() for number, seen in self._seen.items() if seen}
        return {number for number, size in sizes.items() if bool(size.isfinite() & (size > 0))}


def _note(seen: list[tuple[Tensor, Tensor, Tensor]], active: list[bool], n_examples: int, grad: Tensor) -> None:
    """A weighted sum of each example's gradient, how much it may differ, and the sum of the weights."""
    if not active:
        return
    tolerance = _TOLERANCE_HALF if grad.itemsize == 2 else _TOLERANCE
    numbers = torch.view_as_real(grad) if grad.is_complex() else grad
    rows = numbers.reshape(n_examples, -1).to(torch.promote_types(numbers.dtype, torch.float32))
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    products = rows * weights
    seen.append((products.sum(1), products.abs().sum(1) * tolerance, weights.sum()))


def random_state(device: torch.device) -> Tensor:
    """The state of the device's random numbers: the same after a forward pass that draws none."""
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "mps":
        return torch.mps.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def check_outputs(model: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise if an environment alone has other outputs than together with the others.

    Values may depend on other examples where gradients do not: a detached mean of the batch, a branch on a value.
    """
    for x, rows in zip(inputs, outputs, strict=True):
        alone = model(x.clone()).detach()  # which the model may change in place
        half = rows.itemsize == 2 or torch.is_autocast_enabled(x.device.type)
        tolerance = rows.abs().amax() * (_OUTPUT_TOLERANCE_HALF if half else _OUTPUT_TOLERANCE)
        if alone.shape != rows.shape or bool(((alone - rows).abs() > tolerance).any()):
            raise UnsupportedError("examples do not pass through the model independently of each other")
