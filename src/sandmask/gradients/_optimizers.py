"""Warn once if masked gradients are applied by an optimizer with decoupled weight decay, such as AdamW."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from sandmask.masks._errors import warn_once

# First parameters of models, held weakly: those whose optimizer has not stepped yet, and all that were ever watched.
_pending = WeakIdKeyDictionary()
_watched = WeakIdKeyDictionary()
_lock = threading.Lock()
_hooks: list[RemovableHandle] = []


def watch_optimizer(model_key: Tensor) -> None:
    """Look at the first optimizer that steps with this parameter, which stands for its model.

    Parameters do not know their optimizer, so a hook sees the steps of all optimizers. It stays, since torch cannot
    remove one while another thread runs it, but returns at once when no model is pending.
    """
    if model_key in _watched:
        return
    with _lock:
        _watched[model_key] = _pending[model_key] = True
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_inspect))


def _inspect(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    if torch.compiler.is_compiling() or len(_pending) == 0:
        return
    with _lock:
        found = [p for group in optimizer.param_groups for p in group["params"] if p in _pending]
        for param in found:
            del _pending[param]
    if found and any(_decays_decoupled(optimizer, group) for group in optimizer.param_groups):
        warn_once(
            "decoupled-weight-decay",
            f"Masked gradients are applied by {type(optimizer).__name__} with decoupled weight decay. Weights whose "
            "gradient is masked then hardly shrink, and what was learned from a single environment stays. Use "
            "`torch.optim.Adam(..., weight_decay=...)`, whose weight decay is part of the gradient, or set "
            "`weight_decay=0`.",
            stacklevel=4,  # the caller of `optimizer.step`
        )


def _decays_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """AdamW of torch says so in its groups; those of other libraries have the name."""
    decoupled = group.get("decoupled_weight_decay", False) or "AdamW" in type(optimizer).__name__
    return bool(decoupled) and float(group.get("weight_decay", 0.0)) != 0.0
