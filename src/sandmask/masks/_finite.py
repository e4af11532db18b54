"""Find the parameter and the environment of a gradient that is not finite, synchronizing only once."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, _foreach_norm

from sandmask.masks._errors import MaskError
from sandmask.masks._layout import Layout

_MOST_PENDING = 4096
_LOSS = 2**62  # stands for a loss instead of a tensor's index, and is larger than all indices


class FiniteCheck:
    """The largest magnitude of each tensor and environment. It stays on the device until it is read."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, list[int], Tensor]] = []
        self.found: tuple[int, int, float] | None = None

    def record(self, environment: int, slots: list[int], grads: Sequence[Tensor]) -> None:
        """Remember the largest magnitude of each tensor. If a tensor contains NaN or inf, so does its magnitude."""
        filled = [(slot, grad) for slot, grad in zip(slots, grads, strict=True) if grad.numel() > 0]
        if not filled:
            return
        self._add(environment, [slot for slot, _ in filled], largest([grad for _, grad in filled]))

    def record_loss(self, environment: int, loss: Tensor) -> None:
        """Remember a loss. The loss of an empty batch is NaN, although its gradients are zero."""
        self._add(environment, [_LOSS], loss.detach().reshape(1))

    def _add(self, environment: int, slots: list[int], values: Tensor) -> None:
        self.pending.append((environment, slots, values))
        if len(self.pending) > _MOST_PENDING:  # bounds the memory for any number of environments
            self._settle()

    def extend(self, other: "FiniteCheck", offset: int) -> None:
        """Add the records of `other`. Its first environment has the number `offset` here."""
        self.pending.extend((environment + offset, slots, norms) for environment, slots, norms in other.pending)
        if self.found is None and other.found is not None:
            environment, slot, value = other.found
            self.found = (environment + offset, slot, value)

    def raise_if_not_finite(self, layout: Layout) -> None:
        """Raise an error for the first gradient, in the order of environments, that is not finite."""
        self._settle()
        if self.found is not None:
            environment, slot, value = self.found
            raise not_finite(layout, slot, environment, value)

    def _settle(self) -> None:
        pending, self.pending = self.pending, []
        for device in {norms.device for _, _, norms in pending}:
            here = [entry for entry in pending if entry[2].device == device]
            values = torch.cat([norms for _, _, norms in here]).tolist()
            places = [(environment, slot) for environment, slots, _ in here for slot in slots]
            bad = [(*place, value) for place, value in zip(places, values, strict=True) if not math.isfinite(value)]
            self.found = min([*bad, *([self.found] if self.found else [])], default=None)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, including NaN and inf. No tensor is empty, and all are on one device."""
    if tensors[0].device.type == "cpu":  # on a CPU, the norm takes twenty times as long as the extremes
        extremes = torch.stack([extreme for tensor in tensors for extreme in torch.aminmax(tensor)])
        return extremes.view(-1, 2).abs().amax(1)
    return torch.stack(list(_foreach_norm(list(tensors), math.inf)))


def all_finite(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Whether all elements are finite, as a 0-dimensional boolean tensor on each device."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    devices = dict.fromkeys(tensor.device for tensor in filled)
    return [largest([t for t in filled if t.device == device]).isfinite().all() for device in devices]


def check_gradients_finite(
    layout: Layout, gradients: Mapping[int, Tensor], means: Sequence[Tensor], environments: Sequence[int]
) -> None:
    """Raise an error if a gradient `[E, *shape]` is not finite. Checks the means first, which are E times smaller."""
    if all(bool(flag) for flag in all_finite(means)):
        return
    for i, of_environments in gradients.items():
        for environment, grad in enumerate(of_environments):
            if not bool(grad.isfinite().all()):
                raise not_finite(layout, i, environments[environment], float(grad[~grad.isfinite()][0]))


def not_finite(layout: Layout, slot: int, environment: int, value: float) -> MaskError:
    """The error for a gradient or a loss that is not finite."""
    if slot == _LOSS:
        return loss_not_finite(environment, value)
    return MaskError(
        f"{layout.describe(slot)} in environment {environment} should be finite. Found {value}. "
        "Look for an overflow in the loss of this environment, lower the learning rate, or, with "
        "float16, pass a `GradScaler`."
    )


def loss_not_finite(environment: int, value: float) -> MaskError:
    """The error for a loss that is not finite, although its gradients are."""
    return MaskError(
        f"The loss of environment {environment} should be finite. Found {value}. If its batch is empty, leave out "
        "the environment, or pass `check_finite=False`."
    )
