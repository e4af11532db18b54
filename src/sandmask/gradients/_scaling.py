"""Mixed precision: scale losses for autograd, unscale gradients for the mask, scale the result again."""

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, _foreach_mul
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from sandmask.gradients._validator import nodes
from sandmask.masks import MaskError
from sandmask.masks._finite import all_finite
from sandmask.masks._two_pass import accumulation_dtype

_checked: WeakSet[GradScaler] = WeakSet()


class Scaling:
    """The factor of a `GradScaler`, or 1. It stays on the devices: reading it would wait for them."""

    def __init__(self, scaler: GradScaler | None) -> None:
        if not isinstance(scaler, GradScaler | None):
            raise MaskError(
                f"Parameter `scaler` should be a `torch.amp.GradScaler`. Found {type(scaler).__name__}. "
                "Of timm's `NativeScaler`, pass the attribute `_scaler`."
            )
        self._scaler = GradScaler(enabled=False) if scaler is None else scaler
        self.active = self._scaler.is_enabled()

    def check_unscaled(self, loss: Tensor) -> None:
        """Raise if the loss was already multiplied by the scaler; checked once for each scaler."""
        if not self.active or self._scaler in _checked:
            return
        scale = self._scaler.get_scale()
        if scale != 1.0 and any(scale in _factors_of(node) for node in nodes(loss)):
            raise MaskError(
                f"A loss was multiplied by the scaler's factor {scale:g} before: its gradient would be scaled twice. "
                "Pass losses that are not scaled: with `scaler=...`, `sandmask.backward` scales them itself."
            )
        _checked.add(self._scaler)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss as autograd should see it."""
        return self._scaler.scale(loss)

    def unscale(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients at their true scale, in at least float32: float16 might not hold them."""
        if not self.active:
            return list(grads)
        present = {i: _widened(grad) for i, grad in enumerate(grads) if grad is not None}
        factors = {device: factor.reciprocal() for device, factor in self._factors(present.values()).items()}
        unscaled = dict(zip(present, _times(list(present.values()), factors), strict=True))
        return [unscaled.get(i) for i in range(len(grads))]

    def rescale(self, masked: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
        """Masked gradients at the scaler's scale; all NaN if any environment's gradient was not finite.

        Otherwise the scaler would miss an overflow where the mask is 0.
        """
        if not self.active:
            return list(masked)
        factors = self._factors(masked)
        for flag in all_finite(means):
            factors = {d: torch.where(flag.to(d), factor, torch.nan) for d, factor in factors.items()}
        return _times(masked, factors)

    def _factors(self, tensors: Iterable[Tensor]) -> dict[torch.device, Tensor]:
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        return {device: self._scaler.scale(torch.ones((), device=device)) for device in devices}


def _factors_of(node: Node) -> list[float]:
    """The numbers that a node of an autograd graph multiplies with."""
    if node.name() != "MulBackward0":
        return []
    try:
        saved = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    except RuntimeError:  # the graph was freed, about which the backward pass has the better error
        return []
    return [factor.item() for factor in saved if isinstance(factor, Tensor) and factor.numel() == 1]


def _widened(grad: Tensor) -> Tensor:
    """Complex gradients are not converted; the moments raise an error for them."""
    return grad.to(accumulation_dtype(grad.dtype)) if grad.is_floating_point() else grad


def _times(tensors: Sequence[Tensor], factors: dict[torch.device, Tensor]) -> list[Tensor]:
    """Every tensor times its device's factor, a launch or few for all of a device."""
    products: dict[int, Tensor] = {}
    for device, factor in factors.items():
        here = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        products.update(zip(here, _foreach_mul([tensors[i] for i in here], factor), strict=True))
    return [products[i] for i in range(len(tensors))]
