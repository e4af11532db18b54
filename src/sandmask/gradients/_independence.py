"""Check that the gradients and outputs of an example do not depend on other examples."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sandmask.gradients._tape import UnsupportedError

# How much an output may differ, relative to the largest output, if a batch has more examples: torch may choose other
# kernels.
_OUTPUT_TOLERANCE = 1e-2
_OUTPUT_TOLERANCE_HALF = 1e-1

# How much a gradient may change, relative to its size, if the losses of other environments change. Kernels without a
# fixed order of summation change it by rounding errors.
_TOLERANCE = 1e-4
_TOLERANCE_HALF = 2e-2
_FACTORS = (0.0, 1.0, 0.5, 0.25)


class IndependenceCheck:
    """Compares two backward passes: one of the losses, and one of the losses multiplied by different factors.

    If examples are independent of each other, the gradient of a row is multiplied by the factor of its environment.
    Factors are zero or powers of two, so that the multiplication is exact. In environments with the factor zero, even
    the smallest gradient from another environment is detected. Only two numbers of each example are kept. Nothing is
    compared before `activate`.

    A gradient that is zero (as behind a factor that starts at zero) or not finite (as after an overflow) gives no
    information, so `told` leaves its tensor out.

    :param sizes: number of examples of each environment.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._active: list[bool] = []
        self._factors = [_FACTORS[(e + e // 4 + e // 16) % 4] for e in range(len(sizes))]
        self._sizes = list(sizes)
        self._seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        # The smallest normal number of any tensor's dtype: multiples of smaller float16 numbers are not exact.
        self._tiny = 0.0

    def watch(self, output: Tensor, number: int) -> None:
        """Compare the gradients of this tensor, which has one or more rows per example."""
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

        Gradients that are not finite pass, because another check raises an error for them.
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
    """Note a weighted sum of each example's gradient, its tolerance, and the sum of the weights."""
    if not active:
        return
    tolerance = _TOLERANCE_HALF if grad.itemsize == 2 else _TOLERANCE
    numbers = torch.view_as_real(grad) if grad.is_complex() else grad
    rows = numbers.reshape(n_examples, -1).to(torch.promote_types(numbers.dtype, torch.float32))
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    products = rows * weights
    seen.append((products.sum(1), products.abs().sum(1) * tolerance, weights.sum()))


def random_state(device: torch.device) -> Tensor:
    """The state of the device's random number generator. A forward pass without random numbers does not change it."""
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "mps":
        return torch.mps.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def check_outputs(model: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise if the outputs of an environment change when it is passed through the model alone.

    Outputs may depend on other examples even if gradients do not: a detached mean of the batch, a branch on a value.
    """
    for x, rows in zip(inputs, outputs, strict=True):
        alone = model(x.clone()).detach()  # a clone, because the model may change its input in place
        half = rows.itemsize == 2 or torch.is_autocast_enabled(x.device.type)
        tolerance = rows.abs().amax() * (_OUTPUT_TOLERANCE_HALF if half else _OUTPUT_TOLERANCE)
        if alone.shape != rows.shape or bool(((alone - rows).abs() > tolerance).any()):
            raise UnsupportedError("examples do not pass through the model independently of each other")
